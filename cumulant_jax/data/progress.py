"""What is shown on standard error while images are decoded, where that takes a while."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Progress = Callable[[int, int], None]

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 10.0


class DecodingReport:
    """Called with (images done, images in all) while a split is decoded; a context manager.

    It stays silent for two seconds. Then a terminal gets a progress bar, anything else a plain line
    and another one every ten seconds.

    >>> with DecodingReport("split 'train' of tiny") as report:
    ...     report(1024, 2048)
    """

    def __init__(
        self,
        what: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts the clock.

        Args:
          what: what is decoded.
          stream: where to write; None is standard error.
          clock: the time in seconds.
        """
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + _QUIET_SECONDS
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Shows how far the decoding is."""
        if self._bar is None and self._clock() < self._next:
            return
        if not self._stream.isatty():
            self._next = self._clock() + _LINE_SECONDS
            print(f"decoding {self._what}: {done}/{total} images", file=self._stream, flush=True)
            return
        if self._bar is None:
            self._bar = self._start_bar(total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def __enter__(self) -> "DecodingReport":
        return self

    def __exit__(self, *error: object) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self, total: int) -> Any:
        # Imported here: rich takes 0.1 s, which short decodings need not spend.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("decoding {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        bar.add_task(self._what, total=total)
        bar.start()
        return bar
