"""Measures speed and memory on this machine, against the alternatives, in one run.

    python -m experiments.benchmark --directory runs/benchmark
    python -m experiments.benchmark --parts attention --tokens 1024,4096 --directory runs/benchmark
    python -m experiments.benchmark --parts step --configs configs/digits.py,configs/cifar10.py \
        --directory runs/benchmark

    python -m experiments.benchmark --parts kernels --tokens 197,4096,65536 --directory runs/kernels
    python -m experiments.benchmark --tune --tokens 1024,16384 --directory runs/tuning

Parts: "attention" (forward and backward of every kind against tokens), "memory" (peak of a process
at the largest number of tokens), "step" (the training loop against the bare step), "kernels" (the
operations on this device: checked, then timed against its own copy bandwidth and matmul rate, XLA,
JAX's and PyTorch's attention), "models" (forward and backward of small models at 224 pixels, batch
8, beside PyTorch's). Writes benchmark.md, benchmark.json and attention.png. With --tune
it tunes block sizes for this device instead and writes block_sizes.json. Let nothing else run
meanwhile.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

import jax

from cumulant_jax.analysis import describe_environment
from cumulant_jax.analysis.attention_cost import (
    DOT_PRODUCT,
    QUADRATIC,
    Case,
    Cost,
    measurable_kinds,
    measure,
    peak_memory,
)
from cumulant_jax.analysis.cost_plot import plot_costs
from cumulant_jax.analysis.kernel_benchmark import measure_rates
from cumulant_jax.analysis.model_benchmark import measure_models
from cumulant_jax.naming import unknown_name
from cumulant_jax.training import build, load_config
from experiments import cli
from experiments.device_tables import (
    kernel_cases,
    kernel_table,
    measure_kernels,
    model_table,
    tune_block_sizes,
)
from experiments.step_overhead import measure_overhead

PARTS = ("attention", "memory", "step", "kernels", "models")
KERNEL_KINDS = ("cumulant2", "cumulant3", "linear", "tssa")
KINDS = f"linear,cumulant2,cumulant3,cumulant3_full,cumulant4,tssa,xca,softmax,{DOT_PRODUCT}"
TOKENS = "256,1024,2048,4096,8192,16384,32768,65536"
# Beyond this many tokens a quadratic kind needs more memory than the machines this is meant for.
MOST_QUADRATIC_TOKENS = 8192
MOST_FULL_TOKENS = 16384


def main(args: argparse.Namespace) -> int:
    """Runs the parts that were asked for and writes the results after each."""
    parts = _names("part", args.parts, PARTS)
    kinds = _names("kind", args.kinds, measurable_kinds())
    tokens = _numbers("--tokens", args.tokens)
    if args.tune:
        args.directory.mkdir(parents=True, exist_ok=True)
        path = args.directory / "block_sizes.json"
        options = {"dtype": _dtype(args.dtype), "heads": args.heads, "rounds": args.rounds}
        print("\n".join(tune_block_sizes(tokens, path, _say, **options)))
        return 0
    configs = {}
    if "step" in parts:
        configs = {name: load_config(name, []) for name in args.configs.split(",")}
        for config in configs.values():  # a missing data set is found before anything is measured
            build(config)
    args.directory.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": describe_environment()}
    text = _heading(results["environment"])

    def write() -> None:
        for name, content in (
            ("benchmark.json", json.dumps(results, indent=2) + "\n"),
            ("benchmark.md", "\n".join(text)),
        ):
            (args.directory / name).write_text(content, encoding="utf-8")

    if "attention" in parts:
        costs = _attention(kinds, tokens, args.rounds)
        results["attention"] = [dataclasses.asdict(cost) for cost in costs]
        text += _attention_table(costs)
        plot_costs(costs, args.directory / "attention.png")
        write()
    if "memory" in parts:
        results["memory"] = {k: _memory(k, max(tokens)) for k in kinds if k not in QUADRATIC}
        text += _memory_table(results["memory"], max(tokens))
        write()
    if "step" in parts:
        results["step"] = {}
        for name, config in configs.items():
            _say(f"training step of {name}")
            overhead = measure_overhead(config, steps=args.steps, rounds=args.rounds)
            results["step"][name] = dataclasses.asdict(overhead)
        text += _step_table(results["step"])
        write()
    if "kernels" in parts:
        dtype = _dtype(args.dtype)
        chosen = [kind for kind in KERNEL_KINDS if kind in kinds]
        cases = kernel_cases(chosen, tokens, dtype=dtype, heads=args.heads, dim=args.dim)
        rates = measure_rates(dtype)
        most = MOST_QUADRATIC_TOKENS if jax.default_backend() == "cpu" else max(tokens)
        options = {"torch_python": args.torch_python, "most_quadratic_tokens": most}
        measured = measure_kernels(cases, rates, _say, rounds=args.rounds, **options)
        results["rates"] = dataclasses.asdict(rates)
        results["kernels"] = [dataclasses.asdict(result) for result in measured]
        text += kernel_table(measured, rates)
        write()
    if "models" in parts:
        _say("models: forward and backward at 224 pixels, batch 8")
        times = measure_models(
            batch=8, image_size=224, rounds=args.rounds, torch_python=args.torch_python
        )
        results["models"] = [dataclasses.asdict(time) for time in times]
        text += model_table(times)
        write()
    print("\n".join(text))
    _say(f"written to {args.directory}")
    return 0


def _heading(facts: dict[str, str]) -> list[str]:
    command = f"    python -m experiments.benchmark {' '.join(sys.argv[1:])}"
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    return ["# Benchmark", "", *lines, "", "Command:", "", command, ""]


def _attention(kinds: list[str], tokens: list[int], rounds: int) -> list[Cost]:
    costs = []
    for count in tokens:
        fitting = [k for k in kinds if count <= _most_tokens(k)]
        _say(f"attention at {count} tokens: {', '.join(fitting)}")
        costs += measure(fitting, Case(tokens=count), rounds=rounds)
    return costs


def _most_tokens(kind: str) -> float:
    limits = dict.fromkeys(QUADRATIC, MOST_QUADRATIC_TOKENS) | {"cumulant3_full": MOST_FULL_TOKENS}
    return limits.get(kind, float("inf"))


def _memory(kind: str, tokens: int) -> int | None:
    if tokens > _most_tokens(kind):
        return None
    _say(f"peak memory of {kind} at {tokens} tokens")
    return peak_memory(kind, Case(tokens=tokens))


def _attention_table(costs: list[Cost]) -> list[str]:
    by_size = {(c.kind, c.tokens): c for c in costs}
    lines = [
        "## Attention, forward and backward (batch 1, 6 heads, dim 64, float32)",
        "",
        f"`speed-up` is over `{DOT_PRODUCT}`; `× matmul` is the time over one large square matrix",
        "product of the same FLOPs; `growth` is over half the tokens. Times are medians.",
        "",
        "| tokens | kind | ms | best ms | speed-up | × matmul | growth | temporaries MB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cost in costs:
        softmax = by_size.get((DOT_PRODUCT, cost.tokens))
        half = by_size.get((cost.kind, cost.tokens // 2))
        cells = [
            str(cost.tokens),
            cost.kind,
            f"{1e3 * cost.seconds:.2f}",
            f"{1e3 * cost.best_seconds:.2f}",
            f"{softmax.seconds / cost.seconds:.1f}" if softmax else "",
            f"{cost.seconds / cost.matmul_seconds:.1f}" if cost.matmul_seconds else "",
            f"{cost.seconds / half.seconds:.2f}" if half else "",
            "" if cost.temporary_bytes is None else f"{cost.temporary_bytes / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _memory_table(peaks: dict[str, int | None], tokens: int) -> list[str]:
    lines = [
        f"## Peak memory of a whole process, forward and backward once at {tokens} tokens",
        "",
        "Python, JAX, inputs, outputs and gradients included.",
        "",
        "| kind | GB |",
        "| --- | ---: |",
    ]
    rows = [
        f"| {k} | {'not measured' if p is None else f'{p / 1e9:.2f}'} |" for k, p in peaks.items()
    ]
    return [*lines, *rows, ""]


def _step_table(overheads: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "## The training loop against the bare compiled step on resident data",
        "",
        "| config | bare ms | loop ms | loop / bare |",
        "| --- | ---: | ---: | ---: |",
    ]
    for config, o in overheads.items():
        lines.append(f"| {config} | {o['bare_ms']:.2f} | {o['loop_ms']:.2f} | {o['ratio']:.3f} |")
    return [*lines, ""]


def _dtype(name: str | None) -> str:
    if name is None:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    known = ("float32", "bfloat16", "float16")
    return _names("dtype", name, known)[0]


def _names(what: str, text: str, known) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(what, name, known))
    return names


def _numbers(option: str, text: str) -> list[int]:
    numbers = text.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ValueError(f"{option} must be positive numbers, as in 1024,4096; got {text!r}.")
    return [int(n) for n in numbers]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(__doc__, config=False)
    parser.add_argument("--parts", default="attention,memory,step", help="which parts to run")
    parser.add_argument("--kinds", default=KINDS, help="attention kinds")
    parser.add_argument("--tokens", default=TOKENS, help="numbers of tokens")
    parser.add_argument("--tune", action="store_true", help="tune block sizes for this device")
    parser.add_argument("--heads", type=int, default=12, help="of part kernels and --tune")
    parser.add_argument("--dim", type=int, default=64, help="of a head, of part kernels")
    parser.add_argument("--dtype", help="of these: bfloat16 but on a CPU, where it is float32")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, to time its attention")
    parser.add_argument("--configs", default="configs/digits.py,configs/cifar10.py")
    parser.add_argument("--steps", type=int, default=200, help="steps of a round of part step")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are counted")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, _parser()))
