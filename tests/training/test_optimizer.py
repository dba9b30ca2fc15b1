import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cumulant_jax.training import ExperimentConfig, OptimizerConfig, build
from cumulant_jax.training.optimizer import decay_mask, make_optimizer, make_schedule


def test_the_schedule_is_warm_up_and_half_a_cosine():
    config = OptimizerConfig(learning_rate=0.2, final_fraction=0.1)
    schedule = make_schedule(config, total_steps=50, warmup_steps=10)
    for step in range(50):
        if step < 10:
            expected = 0.2 * (step + 1) / 10
        else:
            expected = 0.02 + 0.18 * (1 + math.cos(math.pi * (step - 10) / 40)) / 2
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
    assert float(schedule(9)) == pytest.approx(0.2)
    assert float(schedule(10)) == pytest.approx(0.2)
    assert float(schedule(50)) == float(schedule(80)) == pytest.approx(0.02)


def test_without_warm_up_the_schedule_starts_at_the_peak():
    schedule = make_schedule(OptimizerConfig(learning_rate=0.2), total_steps=4, warmup_steps=0)
    np.testing.assert_allclose([schedule(s) for s in (0, 2, 4)], [0.2, 0.1, 0.0], atol=1e-8)


def test_a_warm_up_as_long_as_the_training_is_an_error():
    with pytest.raises(ValueError, match=r"optimizer.warmup: got '9 steps'.*less than the total"):
        make_schedule(OptimizerConfig(warmup="9 steps"), total_steps=9, warmup_steps=9)


@pytest.mark.parametrize("attention", ["softmax", "tssa", "xca"])
def test_only_kernels_decay(attention):
    options = {
        "class_token": True,
        "layer_scale": 0.1,
        "position": "learned",
        **({"qk_norm": "rms", "query_scale": 1.0} if attention == "softmax" else {}),
    }
    config = ExperimentConfig().replace(model__attention=attention, model__options=options)
    params = build(config).shapes.params
    mask = jax.tree_util.tree_flatten_with_path(decay_mask(params))[0]
    shapes = jax.tree.leaves(params)
    decayed = {jax.tree_util.keystr(p) for p, decays in mask if decays}
    kept = {jax.tree_util.keystr(p) for p, decays in mask if not decays}
    assert decayed
    assert all(name.endswith("['kernel']") for name in decayed)
    assert not any(name.endswith("['kernel']") for name in kept)
    # An independent criterion: what is a vector, a scalar or a token never decays.
    for (path, decays), leaf in zip(mask, shapes, strict=True):
        if leaf.ndim < 2 or leaf.shape[0] == 1:
            assert not decays, path
    for word in ("bias", "scale", "class_token", "position"):
        assert any(word in name for name in kept), word


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_updates_are_adamw_as_its_paper_writes_it(clip_norm):
    seed = 7
    rng = np.random.default_rng(seed)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, b2=0.95, clip_norm=clip_norm)
    schedule = make_schedule(config, total_steps=10, warmup_steps=2)
    optimizer = make_optimizer(config, schedule)
    values = {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    params = {"layer": {k: jnp.asarray(v, jnp.float32) for k, v in values.items()}}
    state = optimizer.init(params)
    first, second = ({k: np.zeros_like(v) for k, v in values.items()} for _ in range(2))
    for step in range(5):
        grads = {k: rng.normal(size=v.shape) for k, v in values.items()}
        updates, state = optimizer.update(
            {"layer": {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}}, state, params
        )
        params = optax.apply_updates(params, updates)
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        for name, value in values.items():
            grad = grads[name] * shrink
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            mean = first[name] / (1 - 0.9 ** (step + 1))
            square = second[name] / (1 - 0.95 ** (step + 1))
            decay = 0.3 * value if name == "kernel" else 0.0
            rate = float(schedule(step))
            values[name] = value - rate * (mean / (np.sqrt(square) + 1e-8) + decay)
    for name, expected in values.items():
        actual = params["layer"][name]  # type: ignore[index]
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-6, err_msg=name)
