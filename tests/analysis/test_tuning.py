"""The search for block sizes, on times that are given."""

import math

import pytest

from cumulant_jax.analysis.tuning import tune

CANDIDATES = {"tokens": (64, 128, 256, 512), "lanes": (128, 256)}


def bowl(sizes):
    """Fastest at 256 tokens and 128 lanes; more than 256 tokens fit with 128 lanes only."""
    if sizes["tokens"] * sizes["lanes"] > 512 * 128:
        raise ValueError("does not fit\nsecond line")
    return 1 + abs(math.log2(sizes["tokens"] / 256)) + sizes["lanes"] / 128


def test_the_best_is_found_past_sizes_that_do_not_fit():
    reported = []
    best, trials = tune(
        CANDIDATES, bowl, start={"tokens": 64, "lanes": 256}, report=reported.append
    )
    assert best == {"tokens": 256, "lanes": 128}
    assert reported == trials
    assert len({tuple(t.sizes.items()) for t in trials}) == len(trials), "nothing is tried twice"
    (failed,) = [t for t in trials if t.seconds is None]
    assert failed.error == "does not fit"
    assert failed.sizes == {"tokens": 512, "lanes": 256}


def test_a_gain_within_the_noise_changes_nothing():
    times = {1: 1.0, 2: 0.98}
    best, _ = tune({"a": (1, 2)}, lambda s: times[s["a"]], start={"a": 1})
    assert best == {"a": 1}
    best, _ = tune({"a": (1, 2)}, lambda s: times[s["a"]], start={"a": 1}, least_gain=0.01)
    assert best == {"a": 2}


def test_a_start_that_cannot_run_is_an_error():
    with pytest.raises(RuntimeError, match=r"to begin with.*does not fit"):
        tune(CANDIDATES, bowl, start={"tokens": 512, "lanes": 256})
