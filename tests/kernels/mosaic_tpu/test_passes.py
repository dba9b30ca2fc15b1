"""The bidirectional TPU kernels, interpreted, against the float64 passes: every output by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax import cumulant_attention, linear_attention
from cumulant_jax import kernels as xla
from cumulant_jax.kernels import PolynomialFeatures, elu1
from cumulant_jax.kernels import mosaic_tpu as tpu
from tests.kernels.mosaic_tpu.interpreted import (
    check,
    interpreted,
    normal,
    poison,
    random_mask,
    wide,
)

slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# batch, tokens, heads, dim, value_dim, dtype, features, heads of the mask (0 for none)
PASSES = [
    (2, 197, 3, 64, 64, "float32", PolynomialFeatures(3), 1),
    (1, 130, 4, 64, 64, "bfloat16", PolynomialFeatures(3), 4),
    slow((1, 7, 2, 24, 48, "float32", elu1, 0)),
    slow((1, 1, 1, 128, 128, "float32", PolynomialFeatures(2), 0)),
    slow((2, 7, 2, 8, 24, "float32", PolynomialFeatures(2), 2)),
    slow((1, 1000, 2, 24, 8, "float32", PolynomialFeatures(4), 1)),
    slow((1, 1024, 2, 64, 64, "bfloat16", PolynomialFeatures(3), 0)),
    slow((2, 100, 1, 100, 64, "float32", elu1, 1)),
    slow((1, 130, 3, 48, 128, "float32", jnp.exp, 3)),
    slow((1, 1000, 5, 32, 32, "bfloat16", PolynomialFeatures(2), 1)),
    slow((1, 100, 2, 200, 256, "float32", PolynomialFeatures(3), 0)),
    slow((1, 100, 6, 64, 32, "float32", jax.nn.relu, 0)),
]


@pytest.mark.parametrize("case", PASSES)
def test_passes(case):
    batch, tokens, heads, dim, value_dim, dtype, features, mask = case
    make = functools.partial(normal, dtype=dtype)
    mask = random_mask(0, batch, tokens, mask)
    key = poison(make(1, batch, tokens, heads, dim), mask)
    value = poison(make(2, batch, tokens, heads, value_dim, mean=0.3), mask)
    pivots = 0.1 * normal(3, batch, heads, dim), 0.1 * normal(4, batch, heads, value_dim)
    query = make(5, batch, tokens, heads, dim)
    polynomial = isinstance(features, PolynomialFeatures)
    num_features = features.count(dim) if polynomial else dim
    sums_bar = normal(6, batch, heads, num_features, value_dim + 1)
    matrix, eps = normal(7, *sums_bar.shape), None
    if not polynomial:
        matrix, eps = jnp.abs(matrix), 1e-3
    columns = value_dim + polynomial
    out_bar = make(8, batch, tokens, heads, columns)
    with interpreted():
        sums = tpu.sum_moments(features, key, value, mask, *pivots)
        keys_bar = tpu.sum_moments_backward(features, key, value, mask, *pivots, sums_bar)
        out = tpu.read_out(features, query, matrix, eps)
        bars = tpu.read_out_backward(features, query, matrix, eps, out_bar)
    with jax.enable_x64(True):
        wide_pivots = dict(zip(("key_pivot", "value_pivot"), wide(*pivots), strict=True))
        want, pull = jax.vjp(
            lambda k, v: xla.sum_moments(features, k, v, mask, **wide_pivots), *wide(key, value)
        )
        check("sums key value", (sums, *keys_bar), (want, *pull(*wide(sums_bar))), dtype)
        want, pull = jax.vjp(
            lambda q, m: xla.read_out(features, q, m, normalizer_eps=eps), *wide(query, matrix)
        )
        check("out query matrix", (out, *bars), (want, *pull(*wide(out_bar))), dtype)


def test_query_heads_share_matrices():
    features = PolynomialFeatures(3)
    query, matrix = normal(0, 1, 20, 4, 16), normal(1, 1, 2, 33, 24)
    out_bar = normal(2, 1, 20, 4, 24)
    with interpreted():
        out = tpu.read_out(features, query, matrix)
        query_bar, matrix_bar = tpu.read_out_backward(features, query, matrix, None, out_bar)
    with jax.enable_x64(True):
        want, pull = jax.vjp(lambda q, m: xla.read_out(features, q, m), *wide(query, matrix))
        matrix_bar = matrix_bar.reshape(1, 2, 2, 33, 24).sum(2)
        got = out, query_bar, matrix_bar
        check("out query matrix", got, (want, *pull(*wide(out_bar))), "float32")


# batch, queries, tokens, heads, dim, value_dim, dtype, features, mask, reduction, mean of the keys
FUSED = [
    (2, 197, 197, 3, 64, 64, "float32", PolynomialFeatures(3), 1, "mean", 0),
    slow((1, 197, 197, 4, 64, 64, "bfloat16", PolynomialFeatures(3), 0, "mean", 0)),
    (2, 20, 50, 3, 48, 64, "float32", elu1, 3, None, 0),
    slow((2, 7, 100, 2, 24, 48, "float32", PolynomialFeatures(2), 2, "sum", 0)),
    slow((2, 33, 100, 4, 64, 64, "float32", PolynomialFeatures(4), 1, "mean", 0)),
    slow((1, 130, 130, 2, 64, 64, "float32", PolynomialFeatures(3), 0, "mean", 1000)),
    slow((2, 20, 50, 3, 100, 64, "float32", jnp.exp, 1, None, 0)),
    slow((1, 1, 1, 1, 8, 8, "float32", PolynomialFeatures(3), 0, "sum", 0)),
    slow((1, 50, 50, 5, 128, 128, "bfloat16", PolynomialFeatures(2), 5, "sum", 0)),
    slow((1, 100, 7, 12, 32, 32, "bfloat16", elu1, 0, None, 0)),
]


@pytest.mark.parametrize("case", FUSED)
def test_fused(case):
    batch, queries, tokens, heads, dim, value_dim, dtype, features, mask, reduction, mean = case
    make = functools.partial(normal, dtype=dtype)
    mask = random_mask(0, batch, tokens, mask)
    query = make(1, batch, queries, heads, dim)
    key = poison(make(2, batch, tokens, heads, dim, mean=mean), mask)
    value = poison(make(3, batch, tokens, heads, value_dim, mean=0.3), mask)
    scale = 0.2 + 0.01 * jnp.abs(normal(4, batch, heads))
    out_bar = make(5, batch, queries, heads, value_dim)
    whole_mask = None if mask is None else jnp.swapaxes(mask, 1, 2)[:, :, None]
    if reduction:
        options = {"reduction_is_sum": reduction == "sum"}
        with interpreted():
            out = tpu.fused_cumulant(features, query, key, value, mask, scale, **options)
            bars = tpu.fused_cumulant_backward(
                features, query, key, value, mask, scale, out_bar, **options
            )

        def truth(query, key, value, scale):
            return cumulant_attention(
                query * scale[:, None, :, None],
                key,
                value,
                mask=whole_mask,
                scale=1.0,
                order=features.order,
                reduction=reduction,
            )

        inputs = query, key, value, scale
    else:
        with interpreted():
            out = tpu.fused_linear(features, query, key, value, mask, normalizer_eps=1e-6)
            bars = tpu.fused_linear_backward(
                features, query, key, value, mask, out_bar, normalizer_eps=1e-6
            )
        truth = functools.partial(
            linear_attention, mask=whole_mask, scale=1.0, feature_map=features
        )
        inputs = query, key, value
    with jax.enable_x64(True):
        want, pull = jax.vjp(truth, *wide(*inputs))
        want = (want, *pull(*wide(out_bar)))
        check("out query key value scale"[: None if reduction else 19], (out, *bars), want, dtype)


@pytest.mark.parametrize("features", [PolynomialFeatures(3), elu1])
def test_the_weights_sum_to_one(features):
    """Equal values come out as they went in, in bfloat16 too: all sums use the same roundings."""
    query, key = (normal(seed, 1, 40, 2, 16, dtype="bfloat16") for seed in (0, 1))
    value = jnp.full((1, 40, 2, 16), 3.0, jnp.bfloat16)
    with interpreted():
        if isinstance(features, PolynomialFeatures):
            scale = jnp.ones((1, 2))
            out = tpu.fused_cumulant(
                features, query, key, value, None, scale, reduction_is_sum=False
            )
        else:
            out = tpu.fused_linear(features, query, key, value, None, normalizer_eps=1e-6)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), 3.0, rtol=2**-8)
