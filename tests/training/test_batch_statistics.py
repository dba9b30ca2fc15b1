"""Models with running statistics (ToST) in the training step, in evaluation and in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.training import SilentReporter, build, train
from cumulant_jax.training.checkpoint import Checkpoints
from cumulant_jax.training.mesh import batch_sharding, to_devices


@pytest.fixture
def tost(tiny):
    """Makes configs of a ToST of 4 tokens on the digits; keywords change keys."""
    options = {"dim": 16, "depth": 1, "heads": 2, "patch_size": 4}
    return lambda **changes: tiny().replace(
        model__name="tost_tiny_12", model__options=options, **changes
    )


@pytest.mark.parametrize("parts", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_moves_the_statistics_as_calls_of_the_model_do(parts, tost):
    """Once for each micro-batch, in their order."""
    experiment = build(tost(gradient_accumulation=parts))
    state = experiment.create_state()
    batch = next(experiment.train_iterator())
    model = experiment.task.model(jax.device_get(state.params), jax.device_get(state.model_state))
    images = experiment.task.prepare(
        {name: jnp.asarray(x) for name, x in batch.items()}, rng=None, train=False
    )["image"]
    graphdef, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)

    @jax.jit
    def call(statistics, images):
        model = nnx.merge(graphdef, params, statistics)
        model(images, train=True)
        return nnx.state(model, nnx.BatchStat)

    for part in range(parts):
        statistics = call(statistics, images[part::parts])
    expected = nnx.to_pure_dict(statistics)
    placed = to_devices(batch, batch_sharding(experiment.mesh))
    after, _ = experiment.train_step()(state, placed)
    pairs = jax.tree.leaves_with_path(expected), jax.tree.leaves_with_path(after.model_state)
    assert len(pairs[0]) == len(pairs[1]) == 4
    for (path, want), (other, got) in zip(*pairs, strict=True):
        assert jax.tree_util.keystr(path) == jax.tree_util.keystr(other)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=str(path))


@pytest.mark.slow
def test_a_resumed_run_has_the_statistics_of_one_that_was_not_stopped(tost, tmp_path, same):
    states = {}
    for name, stops in {"whole": [None], "stopped": [5, None]}.items():
        for stop in stops:
            train(tost(), tmp_path / name, reporter=SilentReporter(), stop_after=stop)
        experiment = build(tost())
        with Checkpoints(tmp_path / name / "checkpoints", read_only=True) as checkpoints:
            states[name] = checkpoints.restore(12, experiment.shapes).state
    same(states["stopped"].model_state, states["whole"].model_state)
    fresh = build(tost()).create_state().model_state
    for before, after in zip(
        jax.tree.leaves(fresh), jax.tree.leaves(states["whole"].model_state), strict=True
    ):
        assert np.abs(np.asarray(after) - np.asarray(before)).max() > 1e-2
