"""Batch norm against NumPy, step after step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.batch_norm import BatchNorm


def build(features=3, *, dtype="float32", param_dtype="float32", **options):
    return BatchNorm(
        features, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype), **options
    )


@pytest.mark.parametrize("momentum", [0.1, 0.4])
@pytest.mark.parametrize("seed", [0])
def test_outputs_and_running_statistics(seed, momentum):
    random = np.random.default_rng(seed)
    scale, bias = random.standard_normal((2, 3))
    layer = build(momentum=momentum)
    layer.scale[...], layer.bias[...] = jnp.asarray(scale), jnp.asarray(bias)
    mean, var = np.zeros(3), np.ones(3)
    for _ in range(3):
        x = 2 + 3 * random.standard_normal((2, 4, 5, 3))
        got = layer(jnp.asarray(x, jnp.float32), train=True)
        for feature in range(3):
            values = [x[b, i, j, feature] for b in range(2) for i in range(4) for j in range(5)]
            middle = sum(values) / 40
            squares = sum((v - middle) ** 2 for v in values)
            want = (x[..., feature] - middle) / np.sqrt(squares / 40 + 1e-5)
            want = want * scale[feature] + bias[feature]
            np.testing.assert_allclose(got[..., feature], want, rtol=0, atol=1e-5)
            mean[feature] += momentum * (middle - mean[feature])
            var[feature] += momentum * (squares / 39 - var[feature])
        np.testing.assert_allclose(layer.mean[...], mean, rtol=1e-5)
        np.testing.assert_allclose(layer.var[...], var, rtol=1e-5)
        want = (x - mean) / np.sqrt(var + 1e-5) * scale + bias
        got = layer(jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_digits_survive_a_large_mean():
    x = np.random.default_rng(0).standard_normal((64, 3)) + 4096
    x = x.astype(np.float32)
    layer = build(momentum=1.0)
    layer(jnp.asarray(x), train=True)
    np.testing.assert_allclose(layer.var[...], x.astype(np.float64).var(0, ddof=1), rtol=1e-3)


def test_statistics_are_wide_where_the_computation_is_not():
    layer = build(dtype="bfloat16", param_dtype="bfloat16")
    y = layer(jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3), train=True)
    assert y.dtype == jnp.bfloat16
    assert layer.mean[...].dtype == layer.var[...].dtype == jnp.float32
    np.testing.assert_allclose(layer.mean[...], [0.45, 0.55, 0.65], rtol=1e-6)


def test_no_gradient_goes_through_the_running_statistics():
    graphdef, state = nnx.split(build())

    def moved(x):
        layer = nnx.merge(graphdef, state)
        layer(x, train=True)
        return jnp.sum(layer.mean[...] + layer.var[...])

    gradient = jax.grad(moved)(jnp.arange(12.0).reshape(4, 3))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("merge", [nnx.merge, lambda *parts: nnx.merge(*parts, copy=True)])
def test_state_that_came_in_does_not_change(merge):
    """Inside the gradient of a jitted function, however the module was put together."""
    graphdef, params, statistics = nnx.split(build(), nnx.Param, nnx.BatchStat)

    @jax.jit
    def step(params, statistics, x):
        def loss(params):
            layer = merge(graphdef, params, statistics)
            return jnp.sum(layer(x, train=True) ** 3), nnx.state(layer, nnx.BatchStat)

        return jax.grad(loss, has_aux=True)(params)[1]

    after = step(params, statistics, jnp.arange(12.0).reshape(4, 3))
    np.testing.assert_allclose(after["mean"][...], [0.45, 0.55, 0.65], rtol=1e-6)
    np.testing.assert_array_equal(statistics["mean"][...], 0)


def test_one_value_has_no_variance():
    layer = build()
    with pytest.raises(ValueError, match=r"more than one value per channel, got shape \(1, 1, 3\)"):
        layer(jnp.ones((1, 1, 3)), train=True)
    assert layer(jnp.ones((1, 1, 3))).shape == (1, 1, 3)
