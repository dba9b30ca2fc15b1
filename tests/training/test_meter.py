import time

import jax.numpy as jnp
import pytest

from cumulant_jax.training import NonFiniteError
from cumulant_jax.training.meter import Meter


class Value:
    """Stands for a scalar on a device: counts who waits for it."""

    def __init__(self, step, waited):
        self.step, self.waited = step, waited

    def block_until_ready(self):
        self.waited.append(self.step)
        return self

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("fetched")


def test_a_row_has_the_means_and_the_last_learning_rate():
    meter = Meter(batch_size=10)
    for step in range(1, 101):
        meter.add(step, {"loss": jnp.float32(step), "learning_rate": jnp.float32(1 / step)})
    means, seconds = meter.flush()
    assert means["loss"] == pytest.approx(50.5)
    assert means["learning_rate"] == pytest.approx(0.01)
    assert means["examples_per_second"] == pytest.approx(1000 / seconds)
    meter.add(101, {"loss": jnp.float32(7), "learning_rate": jnp.float32(1)})
    assert meter.flush()[0]["loss"] == 7


def test_a_row_splits_the_time_of_a_step_and_tells_the_share_of_the_peak():
    meter = Meter(batch_size=10, flops=3e6, peak_flops=1e9)
    for step in (1, 2):
        with meter.waiting_for_input():
            time.sleep(0.05)
        with meter.dispatching():
            time.sleep(0.02)
        meter.add(step, {"loss": jnp.float32(1)})
    time.sleep(0.06)
    means, seconds = meter.flush()
    assert means["step_ms"] == pytest.approx(500 * seconds)
    assert 50 <= means["input_wait_ms"] < means["step_ms"]
    assert 20 <= means["dispatch_ms"] < means["step_ms"]
    names = ("input_wait_ms", "dispatch_ms", "device_wait_ms")
    assert sum(means[name] for name in names) == pytest.approx(means["step_ms"])
    assert means["device_wait_ms"] >= 30
    assert means["mfu"] == pytest.approx(2 * 3e6 / seconds / 1e9)
    # The next row starts from nothing; without a known peak there is no share.
    assert meter.flush()[0]["input_wait_ms"] == 0
    assert "mfu" not in Meter(batch_size=1).flush()[0]


def test_steps_are_not_waited_for_one_by_one_and_few_are_in_flight():
    meter, waited = Meter(batch_size=1), []
    for step in range(1, 21):
        meter.add(step, {"loss": Value(step, waited)})  # type: ignore[dict-item]
        assert step not in waited
        assert not waited or waited[-1] >= step - 6
    assert waited == list(range(1, 17))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_value_that_is_not_finite_is_named(value):
    meter = Meter(batch_size=1)
    for step in range(1, 6):
        bad = value if step >= 3 else 1.0
        meter.add(step, {"accuracy": jnp.float32(0), "grad_norm": jnp.float32(bad)})
    with pytest.raises(NonFiniteError, match=r"grad_norm is .* at step 3") as caught:
        meter.flush()
    assert (caught.value.step, caught.value.metric) == (3, "grad_norm")


def test_the_loss_is_named_before_its_gradient():
    meter = Meter(batch_size=1)
    meter.add(1, {"grad_norm": jnp.float32("nan"), "loss": jnp.float32("nan")})
    with pytest.raises(NonFiniteError, match="loss is nan at step 1"):
        meter.flush()


def test_a_long_row_does_not_hide_a_bad_value():
    meter = Meter(batch_size=1)
    steps = iter(range(1, 200))

    def add_all():
        for step in steps:
            meter.add(step, {"loss": jnp.float32("nan" if step == 5 else 1.0)})

    with pytest.raises(NonFiniteError, match="at step 5"):
        add_all()
    assert next(steps) < 50
