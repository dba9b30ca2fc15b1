"""A trace of some steps, for TensorBoard's profiler and Perfetto."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax


class Profiler:
    """Traces the steps of a range, once; a context manager that ends a trace that is open."""

    def __init__(self, directory: Path, steps: tuple[int, int] | None):
        """Names where the trace goes.

        Args:
          directory: gets plugins/profile/TIME/*.xplane.pb.
          steps: the first and the last step to trace; None for none.
        """
        self._directory = directory
        self._first, self._last = steps or (0, 0)
        self._is_open = False

    def before(self, step: int) -> None:
        """Starts the trace where this step is the first in the range."""
        if not self._is_open and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._directory))
            self._is_open = True

    def after(self, step: int, result: Any) -> None:
        """Ends the trace where this step is the last, once its result is there."""
        if self._is_open and step >= self._last:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._is_open, self._last = False, 0

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends a trace that is open."""
        if self._is_open:
            self._stop()
