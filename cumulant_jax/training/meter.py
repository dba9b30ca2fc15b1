"""The meter: collects the metrics of the steps without waiting for each, and guards against NaN."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Steps that may be on their way to the device. Enough that it never waits for Python, few enough
# that a stop or a failure is noticed soon.
_IN_FLIGHT = 4

# Steps whose metrics are fetched together.
_FETCH = 32


class NonFiniteError(ArithmeticError):
    """A metric of a step is NaN or infinite.

    Attributes:
      step: the step, counted from 1.
      metric: the metric's name.
    """

    def __init__(self, step: int, metric: str, value: float):
        """Builds the message."""
        super().__init__(
            f"training stopped: {metric} is {value} at step {step}; checkpoints hold only "
            "steps before it. Try a lower optimizer.learning_rate, a longer warm-up or a smaller "
            "clip_norm."
        )
        self.step = step
        self.metric = metric


def require_finite(step: int, values: Mapping[str, float], *, prefix: str = "") -> None:
    """Raises NonFiniteError for the first value that is NaN or infinite, under prefix + name.

    >>> require_finite(1, {"loss": 0.5}, prefix="eval/")
    """
    # The loss first: where it is not finite, its gradient's norm is not either.
    for name in sorted(values, key=lambda name: name != "loss"):
        if not math.isfinite(values[name]):
            raise NonFiniteError(step, f"{prefix}{name}", values[name])


def require_finite_parameters(step: int, params: Any) -> None:
    """Raises NonFiniteError if a parameter is NaN or infinite.

    The metrics of a step are those of the parameters before it: they do not tell.
    """
    if not jax.device_get(_all_finite(params)):
        raise NonFiniteError(step, "a parameter", math.nan)


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


class Meter:
    """Averages the metrics of the steps between two rows, and measures their time."""

    def __init__(self, *, batch_size: int, flops: float = 0.0, peak_flops: float | None = None):
        """Starts the clock.

        Args:
          batch_size: examples per step.
          flops: of a step, on all devices.
          peak_flops: what all devices can do in a second, for the utilisation; None if unknown.
        """
        self._batch_size = batch_size
        self._flops, self._peak_flops = flops, peak_flops
        self._parts = {"input_wait": 0.0, "dispatch": 0.0}
        self._pending: list[tuple[int, Mapping[str, jax.Array]]] = []
        self._sums: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._count = 0
        self._began = time.perf_counter()

    def waiting_for_input(self) -> contextlib.AbstractContextManager[None]:
        """Counts what is inside as time that the step waits for its batch."""
        return self._timing("input_wait")

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Counts what is inside as time in which Python starts the step."""
        return self._timing("dispatch")

    @contextlib.contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._parts[part] += time.perf_counter() - began

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step, which may still be computing."""
        self._pending.append((step, metrics))
        if len(self._pending) > _IN_FLIGHT:
            oldest_allowed = self._pending[-_IN_FLIGHT - 1][1]
            # One scalar stands for its whole step.
            next(iter(oldest_allowed.values())).block_until_ready()
        if len(self._pending) >= _FETCH + _IN_FLIGHT:
            self._fetch(_FETCH)

    def flush(self) -> tuple[dict[str, float], float]:
        """Waits for the last step and ends the row.

        Returns:
          The metrics' means since the last row, the learning rate's last value,
          `examples_per_second`, the milliseconds of a step (`step_ms`) and of those the ones spent
          waiting for a batch, in starting the step, and waiting for the devices
          (`input_wait_ms`, `dispatch_ms`, `device_wait_ms`; the devices work during all of them),
          and `mfu`, the share of the devices' published peak, where that is known; and the
          seconds that the steps took.

        Raises:
          NonFiniteError: if a metric of a step is not finite.
        """
        self._fetch(len(self._pending))
        seconds = time.perf_counter() - self._began
        means = {name: total / self._count for name, total in self._sums.items()}
        if "learning_rate" in means:
            means["learning_rate"] = self._last["learning_rate"]
        means["examples_per_second"] = self._count * self._batch_size / max(seconds, 1e-9)
        means |= self._times(seconds)
        self._sums, self._count = {}, 0
        self.restart_clock()
        return means, seconds

    def _times(self, seconds: float) -> dict[str, float]:
        parts = {**self._parts, "device_wait": max(0.0, seconds - sum(self._parts.values()))}
        self._parts = dict.fromkeys(self._parts, 0.0)
        count = max(self._count, 1)
        times = {f"{name}_ms": 1e3 * part / count for name, part in parts.items()}
        times["step_ms"] = 1e3 * seconds / count
        if self._peak_flops:
            times["mfu"] = self._flops * self._count / max(seconds, 1e-9) / self._peak_flops
        return times

    def restart_clock(self) -> float:
        """Leaves out of the next row's time what was done since the last one; returns that time."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return seconds

    def _fetch(self, count: int) -> None:
        chunk, self._pending = self._pending[:count], self._pending[count:]
        values: list[dict[str, Any]] = jax.device_get([metrics for _, metrics in chunk])
        for (step, _), metrics in zip(chunk, values, strict=True):
            self._last = {name: float(value) for name, value in metrics.items()}
            require_finite(step, self._last)
            for name, value in self._last.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._count += 1
