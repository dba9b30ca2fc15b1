"""Compiles every kernel for chips that are not there, with their real compilers, and reports.

    python -m experiments.inspect_kernels
    python -m experiments.inspect_kernels --chips v5e --operations cumulant3,causal_linear
    python -m experiments.inspect_kernels --environment-cuda PATH --docs docs/kernels.md

Prints, per kernel and shape: registers, spills, shared memory or VMEM, matrix and copy
instructions, occupancy, bytes, FLOPs and the predicted share of the memory floor. Writes
kernels.csv, kernels.md and what the compilers dumped into --directory; --docs puts the tables
between the markers of a document and the CSV beside it. The compilers are installed once, into
environments of their own under --environments (several GB, announced first). No accelerator is
needed and none is used.

Exit code 1 where a kernel fails to compile or a GPU kernel spills registers.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from cumulant_jax.analysis.kernel_benchmark import KernelCase
from cumulant_jax.analysis.kernel_report import (
    KernelRow,
    case_of,
    make_row,
    read_files,
    spilling,
    to_csv,
)
from cumulant_jax.analysis.kernel_tables import put_between_markers, report
from cumulant_jax.costs.chips import Chip, chip_named
from cumulant_jax.naming import unknown_name
from experiments import cli
from experiments.compiler_environments import Environment, create, plan

_REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = Path(".environments")
DIRECTORY = Path("runs/kernels")
# An H200 has the cores of an H100.
INSPECTED = ("h100", "v5e", "v5p", "v6e")
# Each kind both ways; order 3 with all pairs has no kernel.
OPERATIONS = {
    f"causal_{kind}" if is_causal else kind: (kind, is_causal)
    for is_causal in (False, True)
    for kind in ("cumulant2", "cumulant3", "cumulant4", "linear", "tssa")
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"batch": 256, "tokens": 197, "dim": 64, "dtype": "bfloat16"},
    {"batch": 1, "tokens": 4096, "dim": 64, "dtype": "bfloat16"},
    {"batch": 1, "tokens": 65536, "dim": 64, "dtype": "bfloat16"},
    {"batch": 1, "tokens": 4096, "dim": 128, "dtype": "bfloat16"},
    {"batch": 1, "tokens": 4096, "dim": 64, "dtype": "float32"},
)
IN_DETAIL = ("cumulant3", "linear", "causal cumulant3", "tssa")


def main(args: argparse.Namespace) -> int:
    """Compiles, reports and says what is wrong."""
    chips = [chip_named(name) for name in args.chips.split(",")]
    cases = kernel_cases(args.operations.split(","))
    if args.docs is not None:
        is_all = {chip.name for chip in chips} == set(INSPECTED) and len(cases) == _all_cases()
        if not is_all:
            raise ValueError("--docs wants the whole report; leave --chips and --operations out.")
        put_between_markers(args.docs.read_text(encoding="utf-8"), [])
    environments = plan(
        [chip.platform for chip in chips],
        root=args.environments,
        given={"gpu": args.environment_cuda, "tpu": args.environment_tpu},
        jax_version=args.jax,
    )
    for environment in environments:
        _say(environment.announcement)
    for environment in environments:
        create(environment, _say)
    by_platform = {environment.platform: environment for environment in environments}
    rows, versions, problems = [], {}, []
    for chip in chips:
        for record in _compile(chip, cases, by_platform[chip.platform], args.directory):
            if "versions" in record:
                versions |= _named(chip, record["versions"])
            elif "error" in record:
                problems.append(f"{case_of(record).name} on {chip.label}: {record['error']}")
            elif "reason" in record:
                _say(f"{record['program']}: {record['reason']}")
            else:
                compiled = read_files(chip.platform, Path(record["files"]))
                rows.append(make_row(chip, record, compiled))
    problems += [f"{r.kernel} of {r.operation} spills {r.spills} bytes" for r in spilling(rows)]
    _write(args, chips, cases, rows, versions)
    for problem in problems:
        _say(f"error: {problem}")
    return 1 if problems else 0


def kernel_cases(operations: Sequence[str]) -> list[KernelCase]:
    """Every operation of these names at every shape.

    Raises:
      ValueError: there is no operation of a name.
    """
    for name in operations:
        if name not in OPERATIONS:
            raise ValueError(unknown_name("operation", name, OPERATIONS))
    pairs = [OPERATIONS[name] for name in operations]
    return [KernelCase(kind=kind, is_causal=c, **shape) for kind, c in pairs for shape in SHAPES]


def _all_cases() -> int:
    return len(OPERATIONS) * len(SHAPES)


def _compile(
    chip: Chip, cases: Sequence[KernelCase], environment: Environment, directory: Path
) -> Iterator[dict[str, Any]]:
    """Records of the process that compiles, as they come."""
    _say(f"compiling for {chip.label}")
    files = directory.absolute() / chip.name
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    requests = files / "cases.jsonl"
    requests.write_text("".join(f"{json.dumps(dataclasses.asdict(case))}\n" for case in cases))
    command = [str(environment.python), "-m", "experiments.compile_kernels"]
    command += ["--platform", chip.platform, "--topology", chip.topology]
    with requests.open() as stdin, (files / "compiler.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--directory", str(files)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=_REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(_REPOSITORY)},
        )
        with process:
            try:
                yield from map(json.loads, process.stdout or ())
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        raise OSError(
            f"the compiler of {chip.label} stopped with {process.returncode}; see {log.name}."
        )


def _named(chip: Chip, versions: dict[str, str]) -> dict[str, str]:
    """Versions of both environments, told apart where they differ by platform."""
    return {f"{name} ({chip.platform})": version for name, version in versions.items()}


def _write(args: argparse.Namespace, chips, cases, rows: list[KernelRow], versions) -> None:
    shown = "python -m experiments.inspect_kernels"
    lines = report(
        chips,
        cases,
        rows,
        in_detail=IN_DETAIL,
        versions=versions,
        command=shown,
        date=datetime.date.today().isoformat(),
    )
    print("\n".join(lines))
    (args.directory / "kernels.md").write_text("\n".join(lines), encoding="utf-8")
    (args.directory / "kernels.csv").write_text(to_csv(rows), encoding="utf-8")
    if args.docs is not None:
        text = put_between_markers(args.docs.read_text(encoding="utf-8"), lines)
        args.docs.write_text(text, encoding="utf-8")
        args.docs.with_suffix(".csv").write_text(to_csv(rows), encoding="utf-8")
    _say(f"written to {args.directory}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(__doc__, config=False, directory=DIRECTORY)
    parser.add_argument("--chips", default=",".join(INSPECTED), help="to compile for")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="what to compile")
    parser.add_argument("--docs", type=Path, help="a document with markers for the tables")
    parser.add_argument("--jax", default=jax.__version__, help="the release to compile with")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where to install")
    parser.add_argument("--environment-cuda", type=Path, help="use this one with jax[cuda13]")
    parser.add_argument("--environment-tpu", type=Path, help="use this one with jax[tpu]")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, _parser()))
