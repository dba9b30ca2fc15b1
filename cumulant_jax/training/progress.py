"""Reporters: what is shown while training runs."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from cumulant_jax.training.summary import RunInfo, Summary

# The share of a step's time that waiting for its batch may take before the log says so.
_MUCH_WAITING = 0.1


class Reporter(Protocol):
    """Watches a run; `train` calls it from the main thread, a few times a second at most."""

    def on_start(self, info: RunInfo) -> None:
        """The run is ready to train (everything is compiled), at step `info.start_step`."""

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training metrics averaged since the last call, besides `examples_per_second`."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done: its metrics, such as `loss` and `accuracy`."""

    def on_finish(self, summary: Summary) -> None:
        """The run ended: completed, stopped early or interrupted."""


class SilentReporter:
    """Shows nothing."""

    def on_start(self, info: RunInfo) -> None:
        """Does nothing."""

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def on_finish(self, summary: Summary) -> None:
        """Does nothing."""


def default_reporter(stream: TextIO | None = None) -> "ProgressBar | PlainLines":
    """Returns a progress bar where `stream` (standard output) is a terminal, else plain lines."""
    output: TextIO = stream or sys.stdout
    return ProgressBar() if output.isatty() else PlainLines(output)


class PlainLines:
    """One line for each row of metrics, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None):
        """Writes to `stream`, standard output by default."""
        self._stream = stream or sys.stdout
        self._info: RunInfo | None = None
        self._began = time.monotonic()

    def on_start(self, info: RunInfo) -> None:
        """Prints what is trained."""
        self._info, self._began = info, time.monotonic()
        self._print(describe_run(info))

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step, loss, accuracy, speed and time left."""
        if self._info is None:
            return
        left = remaining_seconds(self._info, step, time.monotonic() - self._began)
        parts = [f"step {step}/{self._info.total_steps}", *metric_texts(metrics)]
        if "examples_per_second" in metrics:
            parts += speed_texts(metrics, self._info.unit)
        self._print("  ".join([*parts, f"ETA {format_seconds(left)}"]))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of the evaluation."""
        self._print("  ".join([f"evaluation at step {step}", *metric_texts(metrics)]))

    def on_finish(self, summary: Summary) -> None:
        """Prints the final line."""
        self._print(describe_summary(summary))

    def close(self) -> None:
        """Does nothing: every line is complete."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class ProgressBar:
    """A live progress bar of one line; evaluations stay above it as lines of their own."""

    def __init__(self, console: Any = None):
        """Makes the bar, on a rich Console; it appears with `on_start`."""
        # Imported here: rich takes 0.1 s, which runs without a terminal need not spend.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[metrics]}"),
            console=console or Console(),
            transient=True,
        )
        self._bar = None
        self._info: RunInfo | None = None
        self._began = time.monotonic()

    def on_start(self, info: RunInfo) -> None:
        """Shows the bar."""
        self._info, self._began = info, time.monotonic()
        self._progress.console.print(describe_run(info), highlight=False)
        self._bar = self._progress.add_task(
            info.label, total=info.total_steps, completed=info.start_step, metrics=""
        )
        self._progress.start()

    def on_step_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar and shows loss, accuracy, speed and time left."""
        if self._info is None or self._bar is None:
            return
        left = remaining_seconds(self._info, step, time.monotonic() - self._began)
        parts = metric_texts(metrics)
        if "examples_per_second" in metrics:
            parts += speed_texts(metrics, self._info.unit)
        text = "  ".join([*parts, f"ETA {format_seconds(left)}"])
        self._progress.update(self._bar, completed=step, metrics=text)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of the evaluation above the bar."""
        text = "  ".join([f"evaluation at step {step}", *metric_texts(metrics)])
        self._progress.console.print(text, highlight=False)

    def on_finish(self, summary: Summary) -> None:
        """Takes the bar away and prints the final line."""
        self.close()
        self._progress.console.print(describe_summary(summary), highlight=False)

    def close(self) -> None:
        """Takes the bar away and gives the cursor back."""
        self._progress.stop()


def describe_run(info: RunInfo) -> str:
    """One line on what is about to be trained."""
    resumed = f", resuming at step {info.start_step}" if info.start_step else ""
    devices = f"{info.num_devices} device{'s' * (info.num_devices > 1)}"
    return (
        f"{info.label}: {info.num_parameters:,} parameters, {info.total_steps} steps of "
        f"{info.batch_size} {info.unit} on {devices}{resumed}"
    )


def describe_summary(summary: Summary) -> str:
    """One line on how a run ended."""
    state = "finished" if summary.completed else "stopped"
    metrics = "  ".join(metric_texts(summary.final_metrics))
    return f"{state} at step {summary.steps} after {summary.wall_seconds:.1f} s  {metrics}".rstrip()


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Returns the texts of loss and accuracy, as far as they are there.

    >>> metric_texts({"loss": 0.51234, "accuracy": 0.875, "grad_norm": 3.0})
    ['loss 0.5123', 'accuracy 87.50%']
    """
    texts = [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    return texts + [f"{k} {100 * metrics[k]:.2f}%" for k in ("accuracy",) if k in metrics]


def speed_texts(metrics: Mapping[str, float], unit: str) -> list[str]:
    """Returns the texts of the speed, and of what holds it back where that is the input.

    >>> times = {"step_ms": 10.0, "input_wait_ms": 6.0, "mfu": 0.41}
    >>> speed_texts({"examples_per_second": 1234.5, **times}, "images")
    ['1234 images/s', 'MFU 41%', 'waits for input 60%']
    """
    texts = [f"{metrics['examples_per_second']:.0f} {unit}/s"]
    if "mfu" in metrics:
        texts.append(f"MFU {metrics['mfu']:.0%}")
    waits = metrics.get("input_wait_ms", 0.0) / max(metrics.get("step_ms", 0.0), 1e-9)
    return [*texts, f"waits for input {waits:.0%}"] if waits > _MUCH_WAITING else texts


def remaining_seconds(info: RunInfo, step: int, elapsed: float) -> float:
    """Extrapolates the seconds left from the steps done since the start of this process."""
    done = step - info.start_step
    return elapsed * (info.total_steps - step) / done if done > 0 else math.inf


def format_seconds(seconds: float) -> str:
    """Formats a time as m:ss or h:mm:ss.

    >>> format_seconds(75), format_seconds(3723)
    ('1:15', '1:02:03')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
