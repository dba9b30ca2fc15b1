"""Stopping in order on Ctrl-C and SIGTERM."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(Exception):
    """Training stopped on a signal, after saving its state.

    Attributes:
      signum: the number of the signal.
      exit_code: what the process should exit with, 128 + the signal.
    """

    def __init__(self, signum: int, message: str):
        """Keeps the signal's number beside the message."""
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it."""
        return 128 + self.signum


class StopRequest:
    """A context in which SIGINT and SIGTERM ask for a stop instead of causing one.

    The first signal sets `signum`, and the loop asks `stops_after` for it after every step. A
    second one quits the process at once. Outside the main thread, where Python allows no handlers,
    nothing is caught.

    Of several processes, all stop after the same step when one of them gets a SIGTERM: JAX tells
    the others, and finds a step that none has passed.
    """

    def __init__(self):
        """Starts with no signal received."""
        self.signum: int | None = None
        self._previous = {}
        self._shared = jax.process_count() > 1

    def stops_after(self, step: int) -> bool:
        """Whether to stop after this step; of several processes each asks at every step."""
        if self._shared and multihost_utils.reached_preemption_sync_point(step):
            self.signum = self.signum or signal.SIGTERM
            return True
        return not self._shared and self.signum is not None

    def __enter__(self) -> Self:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            # With several processes SIGTERM is JAX's, which has a handler of its own.
            signals = _SIGNALS[:1] if self._shared else _SIGNALS
            self._previous = {s: signal.signal(s, self._on_signal) for s in signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Puts the previous handlers back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            if self._shared:
                os.kill(os.getpid(), signal.SIGTERM)
            return
        # os._exit, because a blocked write or a hanging device must not keep the user waiting:
        # the checkpoint before this one is whole, and half-written ones are never used.
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR.encode())
        os.write(2, f"quit at once on a second {signal.Signals(signum).name}\n".encode())
        os._exit(128 + signum)
