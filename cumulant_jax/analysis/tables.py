"""Results of trained models as tables: one row per run as CSV, mean ± sd per kind as Markdown."""

import csv
import dataclasses
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cumulant_jax.analysis.styles import kind_style


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one training run (an attention kind and a seed) came to.

    Attributes:
      kind: the attention kind.
      seed: the run's seed.
      accuracy: top-1 accuracy on the evaluation split at the end, 0 to 1.
      best_accuracy: the highest accuracy of any evaluation during the run, 0 to 1.
      parameters: number of trained parameters.
      images_per_second: training throughput, evaluation and compilation not counted; None where it
        was not measured, as in a run that was resumed with no step left to do.
      step_time_ms: time of a training step, or None likewise.
      step_memory_bytes: memory of the compiled step, or None where the compiler does not tell.
      steps: training steps.
      wall_seconds: the whole run, evaluation and compilation included.
    """

    kind: str
    seed: int
    accuracy: float
    best_accuracy: float
    parameters: int
    images_per_second: float | None
    step_time_ms: float | None
    step_memory_bytes: int | None
    steps: int
    wall_seconds: float


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its sample standard deviation; None where one seed gives none."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Returns the mean and the sample standard deviation (n - 1) of one or more values.

        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, sd=1.4142135623730951)
        >>> Spread.of([2.0])
        Spread(mean=2.0, sd=None)
        """
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd)


@dataclass(frozen=True, kw_only=True)
class KindSummary:
    """One attention kind over its seeds; the fields are those of `RunResult`."""

    kind: str
    seeds: tuple[int, ...]
    accuracy: Spread
    parameters: int
    images_per_second: Spread | None
    step_time_ms: Spread | None
    step_memory_bytes: int | None


def summarize(results: Iterable[RunResult]) -> list[KindSummary]:
    """Returns one summary per attention kind, in the order in which the kinds first appear.

    Args:
      results: finished runs, in any order.

    Raises:
      ValueError: two runs have the same kind and seed, or runs of one kind differ in size.
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.kind, []).append(result)
    return [_summary(kind, runs) for kind, runs in groups.items()]


def _summary(kind: str, runs: list[RunResult]) -> KindSummary:
    seeds = tuple(run.seed for run in runs)
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"results: a seed of kind {kind!r} appears twice: {seeds}")
    sizes = {run.parameters for run in runs}
    if len(sizes) != 1:
        raise ValueError(f"results: runs of kind {kind!r} have different sizes: {sorted(sizes)}")
    memory = [run.step_memory_bytes for run in runs if run.step_memory_bytes is not None]
    return KindSummary(
        kind=kind,
        seeds=seeds,
        accuracy=Spread.of([run.accuracy for run in runs]),
        parameters=runs[0].parameters,
        images_per_second=_measured([run.images_per_second for run in runs]),
        step_time_ms=_measured([run.step_time_ms for run in runs]),
        step_memory_bytes=max(memory) if memory else None,
    )


def _measured(values: Sequence[float | None]) -> Spread | None:
    present = [value for value in values if value is not None]
    return Spread.of(present) if present else None


def to_csv(results: Iterable[RunResult]) -> str:
    """Returns the runs as CSV text: a header, then a line per run with every digit."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(RunResult)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for result in results:
        writer.writerow(dataclasses.asdict(result))
    return out.getvalue()


# The columns every table shows: heading, and the text of a summary in that column.
COLUMNS: dict[str, Callable[[KindSummary], str]] = {
    "attention": lambda row: kind_style(row.kind).label,
    "accuracy, %": lambda row: format_spread(row.accuracy, factor=100, digits=1),
    "parameters": lambda row: f"{row.parameters:,}",
    "images/s": lambda row: format_mean(row.images_per_second),
    "step, ms": lambda row: format_spread(row.step_time_ms, digits=2),
    "memory, MB": lambda row: format_megabytes(row.step_memory_bytes),
    "seeds": lambda row: str(len(row.seeds)),
}


def to_markdown(summaries: Sequence[KindSummary]) -> str:
    """Returns the summaries as a Markdown table with the numbers aligned to the right."""
    lines = [list(COLUMNS)]
    lines += [[text(row) for text in COLUMNS.values()] for row in summaries]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in [padded[0], rule, *padded[1:]])


def format_spread(spread: Spread | None, *, factor: float = 1.0, digits: int = 1) -> str:
    """Returns "mean ± sd", the mean alone where one value has no sd, or a dash for no value.

    >>> format_spread(Spread(0.9612, 0.0031), factor=100)
    '96.1 ± 0.3'
    >>> format_spread(Spread(0.9612, None), factor=100), format_spread(None)
    ('96.1', '-')
    """
    if spread is None:
        return "-"
    mean = f"{spread.mean * factor:.{digits}f}"
    return mean if spread.sd is None else f"{mean} ± {spread.sd * factor:.{digits}f}"


def format_mean(spread: Spread | None) -> str:
    """Returns the mean without decimals, or a dash where there is none.

    >>> format_mean(Spread(10_322.6, 51.0)), format_mean(None)
    ('10,323', '-')
    """
    return "-" if spread is None else f"{spread.mean:,.0f}"


def format_megabytes(size: int | None) -> str:
    """Returns a size in bytes as MB (10**6 bytes), or a dash where it is not known.

    >>> format_megabytes(12_340_000), format_megabytes(None)
    ('12.3', '-')
    """
    return "-" if size is None else f"{size / 1e6:,.1f}"
