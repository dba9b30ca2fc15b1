"""Tunes block sizes: tries values one size after another and keeps what is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One measurement.

    Attributes:
      sizes: the block sizes by name.
      seconds: what a call took; None where it could not run, and then `error` says why.
      error: the first line of the error.
    """

    sizes: Sizes
    seconds: float | None
    error: str = ""


def tune(
    candidates: Mapping[str, Sequence[int]],
    measure: Callable[[Sizes], float],
    *,
    start: Sizes,
    report: Callable[[Trial], None] = lambda trial: None,
    least_gain: float = 0.03,
) -> tuple[Sizes, list[Trial]]:
    """Finds good block sizes by going through them one at a time, until nothing gets faster.

    Args:
      candidates: values to try, by the name of the size.
      measure: seconds per call with these sizes; raises where they cannot run, as where a block
        does not fit.
      start: the sizes to begin with, which must run.
      report: called with every trial.
      least_gain: share of the time that a change must save to be made: less is noise.

    Returns:
      The best sizes, and every trial in order.

    >>> times = {1: 3.0, 2: 1.0, 4: 2.0}
    >>> best, trials = tune({"tokens": (1, 2, 4)}, lambda s: times[s["tokens"]],
    ...                     start={"tokens": 1})
    >>> best, len(trials)
    ({'tokens': 2}, 3)
    """
    trials: dict[tuple, Trial] = {}

    def seconds(sizes: Sizes) -> float:
        key = tuple(sorted(sizes.items()))
        if key not in trials:
            trials[key] = _try(sizes, measure)
            report(trials[key])
        time = trials[key].seconds
        return float("inf") if time is None else time

    best = dict(start)
    if seconds(best) == float("inf"):
        (failed,) = trials.values()
        raise RuntimeError(f"the block sizes to begin with, {best}, cannot run: {failed.error}")
    improved = True
    while improved:
        improved = False
        for name, values in candidates.items():
            fastest = min((best | {name: value} for value in values), key=seconds)
            if seconds(fastest) < (1 - least_gain) * seconds(best):
                best, improved = fastest, True
    return best, list(trials.values())


def _try(sizes: Sizes, measure: Callable[[Sizes], float]) -> Trial:
    try:
        return Trial(sizes, measure(sizes))
    # Compilers and runtimes refuse a block that does not fit with errors of many kinds.
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Trial(sizes, None, lines[0])
