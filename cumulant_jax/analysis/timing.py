"""Timing functions against each other in one run."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call, over the rounds of one measurement.

    Attributes:
      median: the middle round.
      best: the fastest round.
      worst: the slowest round.
    """

    median: float
    best: float
    worst: float


def time_in_turn(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    least_seconds: float = 0.05,
) -> dict[str, Timing]:
    """Times functions in turn, A B C A B C …, so that a drift of the machine's speed hits all.

    Args:
      functions: what to time by name; each returns arrays, which are waited for.
      rounds: rounds counted, after one that is not.
      least_seconds: a function is called repeatedly in a round until this much time is filled.

    Returns:
      Seconds per call by name.

    >>> timings = time_in_turn({"nothing": lambda: None}, rounds=3, least_seconds=0.0)
    >>> timings["nothing"].best <= timings["nothing"].median <= timings["nothing"].worst
    True
    """
    calls = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        began = time.perf_counter()
        jax.block_until_ready(function())
        once = time.perf_counter() - began
        calls[name] = max(1, round(least_seconds / max(once, 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            # Not counted: it pays for what the function before left behind, such as gigabytes of
            # memory that the system is still taking back.
            jax.block_until_ready(function())
            began = time.perf_counter()
            for _ in range(calls[name]):
                jax.block_until_ready(function())
            seconds[name].append((time.perf_counter() - began) / calls[name])
    return {n: Timing(statistics.median(s), min(s), max(s)) for n, s in seconds.items()}
