"""Trains a list of attention kinds with a list of seeds and reports how they compare.

    python -m experiments.compare --config configs/digits.py \
        --kinds softmax,linear,cumulant2,cumulant3,tssa --seeds 0,1 --directory runs/digits

Every run trains the same model on the same images in the same order, but for the attention and the
seed. Ctrl-C saves and stops; the same command goes on where it stopped. Runs that are finished
are not trained again, so kinds and seeds can be added later.

Over many machines: every run is also a command of its own, numbered from 0. --list prints them all
for a SLURM array or a queue, --cell N trains run N and writes no reports, and --collect writes them
from the runs that are finished, at any time:

    python -m experiments.compare … --list > cells.txt
    sh -c "$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" cells.txt)"        # in each task of the array
    python -m experiments.compare … --collect

The directory gets results.csv (a row per run), results.md (a row per kind), curves.png and
report.html, which needs no other file. They are written after every finished run and tell how far
the comparison is.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

try:
    from cumulant_jax import analysis
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name != "matplotlib":
        raise
    needs = 'error: comparisons need Matplotlib: pip install "cumulant_jax[analysis]"'
    print(needs, file=sys.stderr)
    sys.exit(2)
from cumulant_jax.analysis import Comparison, tables
from cumulant_jax.training import ExperimentConfig, Interrupted, NonFiniteError, train
from experiments import cli
from experiments.comparison_plan import Cell, build_each, claim, parse_kinds, parse_seeds, plan
from experiments.comparison_view import Progress, View, make_view

# Kind and seed of the runs that broke off, with the error's text.
Failures = Mapping[tuple[str, int], str]

DEFAULT_KINDS = "softmax,linear,cumulant2,cumulant3,tssa"


def main(args: argparse.Namespace) -> int:
    """Trains what is missing and writes the reports.

    Returns:
      The exit code: 1 if a run broke off because a metric was not finite.

    Raises:
      Interrupted: a signal stopped it; what is finished is on disk and in the reports.
    """
    kinds, seeds = parse_kinds(args.kinds), parse_seeds(args.seeds)
    cells = plan(args.config, kinds, seeds, args.directory)
    if args.list:
        for number in range(len(cells)):
            print(f"{args.command} --cell {number}")
        return 0
    if args.cell is not None:
        return train_one(cells, args.cell, args)
    if not args.collect:
        build_each(cells)
    claim(args.directory, kinds, seeds)
    config = _shared_config(args.config, kinds, seeds)

    def write(cells: Sequence[Cell], failures: Failures) -> Comparison:
        comparison = _comparison(cells, failures, config=config, command=args.command)
        write_reports(comparison, args.directory)
        return comparison

    if args.collect:
        comparison = write(cells, {})
        print(f"{len(comparison.results)} of {len(cells)} runs are finished")
        print(f"Report: {args.directory / 'report.html'}")
        return 0
    try:
        comparison, failures = run(cells, write=write)
    except Interrupted as stop:
        report = args.directory / "report.html"
        raise Interrupted(stop.signum, f"{stop}; the report so far: {report}") from None
    if not sys.stdout.isatty():
        # A terminal shows the live table already.
        print(f"\n{tables.to_markdown(analysis.summarize(comparison.results))}")
    print(f"Report: {args.directory / 'report.html'}")
    for (kind, seed), error in failures.items():
        print(f"error: {kind} seed {seed} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def train_one(cells: Sequence[Cell], number: int, args: argparse.Namespace) -> int:
    """Trains one run of the comparison, beside others that may be at work on other machines.

    Raises:
      ValueError: there is no run of that number.
    """
    if not 0 <= number < len(cells):
        raise ValueError(f"--cell: got {number}, expected 0 to {len(cells) - 1}.")
    cell = cells[number]
    build_each([cell])
    claim(args.directory, parse_kinds(args.kinds), parse_seeds(args.seeds))
    train(cell.config, cell.run.path)
    return 0


def run(
    cells: Sequence[Cell],
    *,
    write: Callable[[Sequence[Cell], Failures], Comparison],
    view: View | None = None,
) -> tuple[Comparison, Failures]:
    """Trains the runs that are not finished, in order.

    A run whose loss is not finite is left as failed, and the others go on.

    Args:
      cells: the runs.
      write: writes the reports; called at the start and after every run.
      view: shows the progress; by default a live table on a terminal, plain lines elsewhere.

    Returns:
      What `write` returned at the end, and the runs that failed with their errors.
    """
    finished = {(c.kind, c.seed): r for c in cells if (r := c.result()) is not None}
    progress = Progress([(cell.kind, cell.seed) for cell in cells], finished)
    comparison = write(cells, progress.failures)
    with _stop_on_signals(), view or make_view(progress) as view:
        for cell in cells:
            if (cell.kind, cell.seed) in finished:
                continue
            view.begin((cell.kind, cell.seed))
            try:
                train(cell.config, cell.run.path, reporter=view)
            except NonFiniteError as error:
                view.fail(error)
                comparison = write(cells, progress.failures)
                continue
            result = cell.result()
            if result is None:
                raise RuntimeError(f"{cell.run.path} is not finished, though its training ended")
            view.end(result)
            comparison = write(cells, progress.failures)
    return comparison, progress.failures


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise Interrupted wherever `train` does not handle them itself.

    That is while a run is prepared and compiled, and while reports are written: at none of these
    is anything lost.
    """

    def stop(signum: int, frame: object) -> None:
        raise Interrupted(signum, f"stopped by {signal.Signals(signum).name} between two runs")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def write_reports(comparison: Comparison, directory: Path) -> None:
    """Writes results.csv, results.md, curves.png and report.html (REPORTS in the plan).

    A reader, or a kill, never sees half of a file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / "results.csv", analysis.to_csv(comparison.results))
    _replace(directory / "results.md", analysis.to_markdown(comparison))
    _replace(directory / "report.html", analysis.to_html(comparison))
    figure = analysis.overview(comparison.curves, analysis.summarize(comparison.results))
    temporary = directory / ".curves.png.tmp"
    analysis.save_png(figure, temporary)
    os.replace(temporary, directory / "curves.png")


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _comparison(
    cells: Sequence[Cell], failures: Failures, *, config: dict, command: str
) -> Comparison:
    finished = [(cell, result) for cell in cells if (result := cell.result()) is not None]
    names = ", ".join(f"{kind} seed {seed}" for kind, seed in failures)
    failed = f" ({len(failures)} failed: {names})" if failures else ""
    return Comparison(
        title=f"Attention kinds compared on {config['data']['name']}" + failed,
        results=[result for _, result in finished],
        curves=[cell.curve() for cell, _ in finished],
        config=config,
        command=command,
        environment=analysis.describe_environment(),
        planned=len(cells),
    )


def _shared_config(config: ExperimentConfig, kinds: Sequence[str], seeds: Sequence[int]) -> dict:
    """The config as the report shows it: the lists where the runs differ."""
    values = config.to_dict()
    values["model"]["attention"] = list(kinds)
    values["seed"] = list(seeds)
    return values


def command_line(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, those of the process by default."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = cli.make_parser(__doc__)
    parser.add_argument(
        "--kinds",
        default=DEFAULT_KINDS,
        metavar="KIND,…",
        help=f"attention kinds, joined by commas; layer by layer with + ({DEFAULT_KINDS})",
    )
    parser.add_argument("--seeds", default="0", metavar="N,…", help="seeds, joined by commas (0)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--list", action="store_true", help="print the command of every run")
    group.add_argument("--cell", type=int, metavar="N", help="train run N only, without reports")
    group.add_argument("--collect", action="store_true", help="only write the reports")
    # What --list and the reports show is the command for the whole.
    argv_of_all = [word for word in argv if word not in ("--list", "--collect")]
    parser.set_defaults(command=shlex.join(["python", "-m", "experiments.compare", *argv_of_all]))
    return cli.run(main, parser, argv)


if __name__ == "__main__":
    sys.exit(command_line())
