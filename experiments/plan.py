"""Says before a reservation starts whether a training run fits on a TPU or GPU machine, and about
how fast it will be, by compiling its real training step for it on this machine.

    python -m experiments.plan --config configs/cifar10.py --topology v5e:2x4
    python -m experiments.plan --config configs/imagenet2012.py:model=vit_b16 \
        --topology v5p:8x8x4 --batch-sizes 4096,8192 --meshes "fsdp=-1;data=-1;fsdp=-1,tensor=2"
    python -m experiments.plan --config configs/imagenet2012.py:model=vit_b16 --topology h100:4x8

A topology is a chip and its arrangement: a TPU slice (v4, v5e, v5p, v6e), or hosts times GPUs
(h100, h200). The data set need not be there where its published size is known. The compilers are
installed once, into environments of their own under --environments (announced first); nothing of
the machine itself is needed.

Reports, for each mesh and batch size, best first: memory on a device, FLOPs, what is sent, and the
step time that follows from the chip's published figures. "fastest" overlaps everything, "estimated"
nothing that is sent; both take the peak of the matrix units and of the memory, so a real step is
slower, often by half. Writes plan.csv and plan.md into --directory.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from cumulant_jax.analysis.plan_tables import exchanges, to_csv, to_markdown
from cumulant_jax.costs.chips import CHIPS, Chip
from cumulant_jax.costs.collectives import Collective
from cumulant_jax.costs.step_estimate import StepCost, best_first, step_cost
from cumulant_jax.data.described import describe
from cumulant_jax.naming import unknown_name
from cumulant_jax.training import ExperimentConfig
from cumulant_jax.training.experiment import build
from cumulant_jax.training.mesh import check_sizes
from cumulant_jax.training.progress import format_seconds
from cumulant_jax.training.tasks import create_task
from experiments import cli
from experiments.compiler_environments import Environment, create, plan
from experiments.inspect_kernels import ENVIRONMENTS

_REPOSITORY = Path(__file__).resolve().parent.parent
DIRECTORY = Path("runs/plan")
MESHES = "data=-1;fsdp=-1;fsdp=-1,sequence=2;fsdp=-1,tensor=2"


def main(args: argparse.Namespace) -> int:
    """Compiles for every mesh and batch size, and reports."""
    chip, arrangement = parse_topology(args.topology)
    configs = configs_of(args.config, args.meshes, args.batch_sizes)
    info = describe(args.config.data)
    # What is wrong with the model or the config shows before anything is installed.
    flops = flops_of_step(args.config, info)
    (environment,) = plan(
        [chip.platform],
        root=args.environments,
        given={"gpu": args.environment_cuda, "tpu": args.environment_tpu},
        jax_version=args.jax,
    )
    _say(environment.announcement)
    create(environment, _say)
    costs, problems = [], []
    for config, answer in _answers(chip, arrangement, configs, info, environment, args.directory):
        if "error" in answer:
            problems.append(f"{config.mesh}, batch {config.batch_size}: {answer['error']}")
            continue
        per_example = flops / args.config.batch_size
        costs.append(_cost(chip, config, answer, flops=per_example * config.batch_size))
    lines = _report(args, chip, info.name, best_first(costs), problems)
    print("\n".join(lines))
    (args.directory / "plan.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (args.directory / "plan.csv").write_text(to_csv(best_first(costs)), encoding="utf-8")
    _say(f"written to {args.directory}")
    for problem in problems:
        _say(f"error: {problem}")
    return 0 if costs else 1


def parse_topology(text: str) -> tuple[Chip, str]:
    """Reads a topology: a chip, and the arrangement as its compiler calls it.

    Raises:
      ValueError: for an unknown chip, or an arrangement that is none.

    >>> chip, arrangement = parse_topology("v5p:8x8x4")
    >>> chip.label, arrangement
    ('TPU v5p', 'v5p:8x8x4')
    >>> parse_topology("h100:4x8")[1]
    '4x8'
    """
    name, _, sizes = text.partition(":")
    if name not in CHIPS:
        raise ValueError(f"--topology: {unknown_name('chip', name, CHIPS)}")
    chip = CHIPS[name]
    shape = sizes.split("x")
    rank = (2,) if chip.platform == "gpu" else (2, 3)
    if len(shape) not in rank or not all(n.isdecimal() and int(n) > 0 for n in shape):
        example = "h100:4x8 (hosts x GPUs)" if chip.platform == "gpu" else chip.topology
        raise ValueError(f"--topology: got {text!r}, expected such as {example}.")
    return chip, sizes if chip.platform == "gpu" else text


def configs_of(config: ExperimentConfig, meshes: str, batch_sizes: str) -> list[ExperimentConfig]:
    """The config with every mesh and batch size.

    Raises:
      ValueError: for a batch size, or a mesh, that is none.
    """
    sizes = batch_sizes.split(",") if batch_sizes else [str(config.batch_size)]
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--batch-sizes: got {size!r}, expected a number of at least 1.")
    texts = [mesh.strip() for mesh in meshes.split(";")]
    for mesh in texts:
        check_sizes(mesh)
    return [config.replace(mesh=mesh, batch_size=int(size)) for size in sizes for mesh in texts]


def flops_of_step(config: ExperimentConfig, info: Any) -> int:
    """Counts the FLOPs of a training step, whatever kernels will run."""
    alone = config.replace(mesh="data=1")
    parts = build(alone, devices=jax.devices()[:1], task=create_task(alone, info=info))
    return parts.step_flops()


def _answers(
    chip: Chip,
    arrangement: str,
    configs: Sequence[ExperimentConfig],
    info: Any,
    environment: Environment,
    directory: Path,
) -> Iterator[tuple[ExperimentConfig, dict[str, Any]]]:
    """Each config with what the compiler's process says of it, as it comes."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(environment.python), "-m", "experiments.compile_step"]
    command += ["--platform", chip.platform, "--topology", arrangement]
    described = {**vars(info), "class_names": []}
    began = time.monotonic()
    with (directory / "compiler.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=_REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(_REPOSITORY)},
            text=True,
        )
        with process:
            try:
                stdin, stdout = process.stdin, process.stdout
                assert stdin is not None
                assert stdout is not None
                devices = _answer(stdout, log.name)["devices"]
                for number, config in enumerate(configs, start=1):
                    left = (time.monotonic() - began) / number * (len(configs) - number + 1)
                    eta = f", ETA {format_seconds(left)}" if number > 1 else ""
                    _say(
                        f"[{number}/{len(configs)}] compiling {config.mesh}, batch "
                        f"{config.batch_size}, for {devices} {chip.label}{eta}"
                    )
                    request = {"config": config.to_dict(), "info": described}
                    stdin.write(json.dumps(request) + "\n")
                    stdin.flush()
                    yield config, _answer(stdout, log.name)
                stdin.close()
            except BaseException:
                process.kill()
                raise


def _answer(stdout: Any, log: str) -> dict[str, Any]:
    line = stdout.readline()
    if not line:
        raise OSError(f"the compiler stopped; see {log}.")
    return json.loads(line)


def _cost(
    chip: Chip, config: ExperimentConfig, answer: dict[str, Any], *, flops: float
) -> StepCost:
    mesh = answer["mesh"]
    found = [
        Collective(**{**item, "group": tuple(item["group"])})
        for item in answer.get("collectives", [])
    ]
    return step_cost(
        chip,
        mesh=",".join(f"{axis}={size}" for axis, size in mesh.items()),
        devices=math.prod(mesh.values()),
        batch_size=config.batch_size,
        dtype=config.model.dtype,
        flops=flops,
        memory_bytes=answer.get("memory_bytes"),
        traffic_bytes=answer.get("traffic_bytes"),
        collectives=found,
        compile_seconds=answer.get("seconds", 0.0),
    )


def _report(
    args: argparse.Namespace,
    chip: Chip,
    data: str,
    costs: Sequence[StepCost],
    problems: Sequence[str],
) -> list[str]:
    config = args.config
    lines = [
        f"# {config.model.name} {config.model.attention} on {data}, {args.topology}",
        "",
        f"{chip.label}: {chip.memory_bytes / 1e9:.0f} GB, {chip.bandwidth / 1e12:.2f} TB/s, "
        f"{chip.matmul_flops[config.model.dtype] / 1e12:.0f} TFLOP/s in {config.model.dtype}, "
        f"{chip.link_bandwidth / 1e9:.0f} GB/s to its neighbours, "
        f"{chip.network_bandwidth / 1e9:.0f} GB/s to other hosts ({chip.source}). "
        f"Compiled with jax {args.jax}.",
        "",
        *to_markdown(chip, costs),
        "",
        "What each device sends in a step, by kind: how often, and how much each time on average.",
        "",
        *exchanges(costs),
    ]
    if chip.platform == "gpu":
        lines += [
            "",
            "The compiler for GPUs does not tell the memory traffic; here it is the least there "
            "can be, so step times are too short where a step is bound by it.",
        ]
    lines += [f"\nNot compiled: {problem}" for problem in problems]
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of this command."""
    parser = cli.make_parser(__doc__, directory=DIRECTORY)
    parser.add_argument(
        "--topology", required=True, metavar="CHIP:SIZES", help="v5p:8x8x4, or h100:4x8"
    )
    parser.add_argument("--meshes", default=MESHES, help=f"separated by ';' (default {MESHES})")
    parser.add_argument("--batch-sizes", default="", help="by default that of the config")
    parser.add_argument("--jax", default=jax.__version__, help="the release to compile with")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where to install")
    parser.add_argument("--environment-cuda", type=Path, help="use this one with jax[cuda13]")
    parser.add_argument("--environment-tpu", type=Path, help="use this one with jax[tpu]")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, make_parser()))
