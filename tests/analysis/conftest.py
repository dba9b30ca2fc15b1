import pytest

from cumulant_jax.analysis import Comparison, Curve, RunResult


def _result(kind: str, seed: int, accuracy: float, **changes) -> RunResult:
    values = {
        "kind": kind,
        "seed": seed,
        "accuracy": accuracy,
        "best_accuracy": accuracy + 0.01,
        "parameters": 151_242,
        "images_per_second": 10_000.0 + 100 * seed,
        "step_time_ms": 6.0 + seed,
        "step_memory_bytes": 12_340_000,
        "steps": 880,
        "wall_seconds": 25.0,
    }
    return RunResult(**{**values, **changes})


@pytest.fixture
def make_result():
    """A function that makes a result of a kind, a seed and an accuracy."""
    return _result


@pytest.fixture
def results():
    """Two kinds, two seeds each, with means that are plain to see: 96 % and 97.5 %."""
    return [
        _result("softmax", 0, 0.95),
        _result("softmax", 1, 0.97),
        _result("cumulant3", 0, 0.96, parameters=151_254),
        _result("cumulant3", 1, 0.99, parameters=151_254),
    ]


@pytest.fixture
def curves(results):
    return [Curve(r.kind, r.seed, (100, 200, 300), (0.5, 0.9, r.accuracy)) for r in results]


@pytest.fixture
def comparison(results, curves):
    return Comparison(
        title="Attention <kinds> on digits",
        results=results,
        curves=curves,
        config={"batch_size": 64, "note": "<b>&amp;</b>"},
        command='python -m experiments.compare --directory "a & b"',
        environment={"jax": "0.12.0", "processor": "one <fast> chip"},
        planned=len(results),
    )
