"""What a comparison shows while it trains: a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cumulant_jax.analysis import RunResult, kind_style
from cumulant_jax.analysis.tables import COLUMNS, summarize
from cumulant_jax.training import RunInfo, Summary
from cumulant_jax.training.progress import format_seconds, metric_texts

_SECONDS_BETWEEN_LINES = 5.0

# What fits into a terminal of 80 columns; the reports have all.
_LIVE_COLUMNS = ("accuracy, %", "images/s", "step, ms")


@dataclass
class Progress:
    """How far a comparison got: the results so far and the run that is being trained.

    Attributes:
      cells: kind and seed of every planned run, in order.
      results: the finished runs.
      failures: the runs that broke off, with the error's text.
      clock: the time in seconds, for tests to replace.
    """

    cells: Sequence[tuple[str, int]]
    results: dict[tuple[str, int], RunResult] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    current: tuple[str, int] | None = None
    info: RunInfo | None = None
    step: int = 0
    began: float = 0.0
    accuracy: float | None = None

    def begin(self, cell: tuple[str, int]) -> None:
        """A run is about to be prepared, compiled and trained."""
        self.current, self.info, self.step, self.accuracy = cell, None, 0, None
        self.began = self.clock()

    def end(self, result: RunResult) -> None:
        """The current run is finished."""
        self.results[result.kind, result.seed] = result
        self.current = self.info = None

    def fail(self, error: Exception) -> None:
        """The current run broke off."""
        if self.current is not None:
            self.failures[self.current] = str(error)
        self.current = self.info = None

    @property
    def number(self) -> int:
        """The current run's place in the plan, from 1."""
        return 0 if self.current is None else self.cells.index(self.current) + 1

    @property
    def fraction(self) -> float:
        """The share of the current run's steps that is done."""
        return self.step / self.info.total_steps if self.info else 0.0

    def remaining_seconds(self) -> float:
        """Estimates the time left for all runs; infinite before anything was measured.

        A run that is still to come takes as long as a finished one of its kind, else as the mean of
        all finished ones, else as the current one by its own pace.
        """
        took: dict[str, list[float]] = {}
        for result in self.results.values():
            took.setdefault(result.kind, []).append(result.wall_seconds)
        means = {kind: sum(times) / len(times) for kind, times in took.items()}
        pace = self._current_pace()
        usual = sum(means.values()) / len(means) if means else pace
        left = 0.0
        for kind, seed in self.cells:
            if (kind, seed) == self.current:
                whole = pace if math.isfinite(pace) else means.get(kind, usual)
                left += whole * (1 - self.fraction)
            elif (kind, seed) not in (*self.results, *self.failures):
                left += means.get(kind, usual)
        return left

    def _current_pace(self) -> float:
        """Extrapolates the whole time of the current run from the steps done in this process."""
        if self.info is None or self.step <= self.info.start_step:
            return math.inf
        per_step = (self.clock() - self.began) / (self.step - self.info.start_step)
        return per_step * self.info.total_steps


class View(Protocol):
    """Shows a comparison's progress; a reporter for `cumulant_jax.training.train` as well."""

    def __enter__(self) -> "View":
        """Starts showing."""
        ...

    def __exit__(self, *error: object) -> None:
        """Stops showing and leaves the last state readable."""

    def begin(self, cell: tuple[str, int]) -> None:
        """A run of this kind and seed is about to be trained."""

    def end(self, result: RunResult) -> None:
        """The run is finished."""

    def fail(self, error: Exception) -> None:
        """The run broke off; the comparison goes on."""

    def on_start(self, info: RunInfo) -> None:
        """The run is compiled and ready to train."""

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training metrics of the last steps."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def on_finish(self, summary: Summary) -> None:
        """The run ended, finished or not."""


def make_view(progress: Progress, stream: TextIO | None = None) -> View:
    """Returns a live table where `stream` (standard output) is a terminal, else plain lines."""
    out = stream if stream is not None else sys.stdout
    return LiveTable(progress) if out.isatty() else PlainLines(progress, out)


class _Reporter:
    """What both views do with a report: remember it."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def begin(self, cell: tuple[str, int]) -> None:
        self.progress.begin(cell)

    def end(self, result: RunResult) -> None:
        self.progress.end(result)

    def fail(self, error: Exception) -> None:
        self.progress.fail(error)

    def on_start(self, info: RunInfo) -> None:
        self.progress.info, self.progress.step = info, info.start_step
        # Compilation is part of a run's time, but not of the pace of its steps.
        self.progress.began = self.progress.clock()

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.step = step

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.step = step
        self.progress.accuracy = metrics.get("accuracy")

    def on_finish(self, summary: Summary) -> None:
        self.progress.step = summary.steps


class PlainLines(_Reporter):
    """Lines for logs and pipes: the start and end of every run, and a sign of life in between."""

    def __init__(self, progress: Progress, stream: TextIO | None = None):
        """Writes to `stream`, standard output by default."""
        super().__init__(progress)
        self._stream = stream if stream is not None else sys.stdout
        self._last_line = -math.inf

    def __enter__(self) -> "PlainLines":
        """Says which runs are already there."""
        done, planned = len(self.progress.results), len(self.progress.cells)
        self._print(
            f"{planned} runs, {done} of them finished earlier" if done else f"{planned} runs"
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the lines as they are."""

    def on_start(self, info: RunInfo) -> None:
        """Prints what is trained."""
        super().on_start(info)
        resumed = f", resuming at step {info.start_step:,}" if info.start_step else ""
        self._print(
            f"{self._where()}: {info.num_parameters:,} parameters, {info.total_steps:,} steps of "
            f"{info.batch_size} {info.unit}{resumed}"
        )
        self._last_line = self.progress.clock()

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the state every few seconds."""
        super().on_step_metrics(step, metrics)
        progress = self.progress
        if progress.info is None or progress.clock() - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = progress.clock()
        parts = [f"{self._where()}  step {step:,}/{progress.info.total_steps:,}"]
        parts += [f"training {text}" for text in metric_texts(metrics)]
        if progress.accuracy is not None:
            parts.append(f"test accuracy {100 * progress.accuracy:.2f}%")
        parts.append(f"all runs: ETA {format_seconds(progress.remaining_seconds())}")
        self._print("  ".join(parts))

    def end(self, result: RunResult) -> None:
        """Prints how the run ended."""
        where = self._where()
        super().end(result)
        self._print(
            f"{where} finished: test accuracy {100 * result.accuracy:.2f}% after "
            f"{result.wall_seconds:.1f} s"
        )

    def fail(self, error: Exception) -> None:
        """Prints why the run broke off."""
        where = self._where()
        super().fail(error)
        self._print(f"{where} failed: {error}")

    def _where(self) -> str:
        kind, seed = self.progress.current or ("", 0)
        return f"[{self.progress.number}/{len(self.progress.cells)}] {kind} seed {seed}"

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveTable(_Reporter):
    """A table with a row per attention kind that fills while the runs train."""

    def __init__(self, progress: Progress, console: Console | None = None):
        """Draws on `console`, the terminal by default."""
        super().__init__(progress)
        self._live = Live(
            console=console or Console(),
            get_renderable=self.renderable,
            refresh_per_second=4,
            # Taller than the terminal: the last lines stay in sight.
            vertical_overflow="crop",
        )

    def __enter__(self) -> "LiveTable":
        """Starts drawing."""
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Draws once more and leaves the table standing."""
        self._live.stop()

    def renderable(self) -> Group:
        """Returns the table, the bar of the whole comparison and the time left."""
        progress = self.progress
        ended = len(progress.results) + len(progress.failures)
        done = ended + progress.fraction * (progress.current is not None)
        left = progress.remaining_seconds()
        footer = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=len(progress.cells), completed=done, width=40)
        words = f"{len(progress.results)}/{len(progress.cells)} runs"
        footer.add_row(bar, Text(words), Text(f"ETA {format_seconds(left)}" if left else ""))
        return Group(self._table(), footer)

    def _table(self) -> Table:
        rows = {row.kind: row for row in summarize(self.progress.results.values())}
        table = Table(header_style="bold", box=SIMPLE_HEAD)
        table.add_column("attention")
        for heading in _LIVE_COLUMNS:
            table.add_column(heading, justify="right")
        table.add_column("now")
        for position, kind in enumerate(dict.fromkeys(kind for kind, _ in self.progress.cells)):
            style = kind_style(kind, position=position)
            texts = [COLUMNS[c](rows[kind]) if kind in rows else "" for c in _LIVE_COLUMNS]
            table.add_row(Text(kind, style=style.color), *map(Text, texts), self._now(kind))
        return table

    def _now(self, kind: str) -> Text:
        progress = self.progress
        if progress.current is None or progress.current[0] != kind:
            failed = [f"seed {seed}" for name, seed in progress.failures if name == kind]
            if failed:
                return Text(f"failed: {', '.join(failed)}", style="red")
            waiting = any(c[0] == kind and c not in progress.results for c in progress.cells)
            return Text("waiting" if waiting else "done", style="dim")
        if progress.info is None:
            return Text(f"seed {progress.current[1]}: compiling")
        parts = [f"seed {progress.current[1]}: {progress.step:,}/{progress.info.total_steps:,}"]
        if progress.accuracy is not None:
            parts.append(f"{100 * progress.accuracy:.1f} %")
        return Text("  ".join(parts))
