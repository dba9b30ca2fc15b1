"""Stopping in order on Ctrl-C and SIGTERM."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Self

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

    The first signal sets `signum`, which the loop looks at after every step. A second one quits
    the process at once. Outside the main thread, where Python allows no handlers, nothing is
    caught.
    """

    def __init__(self):
        """Starts with no signal received."""
        self.signum: int | None = None
        self._previous = {}

    def __enter__(self) -> Self:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._on_signal) for s in _SIGNALS}
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
            return
        # os._exit, because a blocked write or a hanging device must not keep the user waiting:
        # the checkpoint before this one is whole, and half-written ones are never used.
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR.encode())
        os.write(2, f"quit at once on a second {signal.Signals(signum).name}\n".encode())
        os._exit(128 + signum)
