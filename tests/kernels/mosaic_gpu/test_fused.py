"""The fused kernels for short sequences, against float64 with pivots at the means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import (
    PolynomialFeatures,
    elu1,
    masked_mean,
    read_out,
    read_out_matrix,
    sum_moments,
)
from cumulant_jax.kernels.mosaic_gpu import fused_cumulant, fused_linear
from tests.kernels.case_id import case_id

SECOND, THIRD, FOURTH = (PolynomialFeatures(order) for order in (2, 3, 4))

# features, batch, queries, keys, heads, dim, value_dim, masked, dtype, mean, reduction_is_sum
CUMULANTS = [
    (THIRD, 1, 197, 197, 2, 64, 64, None, "bfloat16", 0.0, False),
    (SECOND, 2, 1, 1, 1, 16, 24, None, "bfloat16", 0.0, False),
    (THIRD, 1, 7, 136, 2, 24, 48, "heads", "float16", 0.0, True),
    (THIRD, 1, 64, 200, 1, 64, 64, "shared", "bfloat16", 1000.0, False),
    (FOURTH, 1, 100, 70, 1, 48, 64, "shared", "bfloat16", 0.0, False),
]
ALL_CUMULANTS = [
    (features, 1, queries, keys, heads, dim, value_dim, masked, dtype, mean, is_sum)
    for features in (SECOND, THIRD, FOURTH)
    for queries, keys, heads, dim, value_dim, masked, dtype, mean, is_sum in (
        (1, 7, 2, 16, 16, None, "float16", 0.0, True),
        (100, 1, 1, 24, 48, None, "bfloat16", 0.0, False),
        (197, 197, 3, 64, 64, "heads", "bfloat16", 0.0, False),
        (512, 512, 1, 64, 64, None, "bfloat16", 0.0, False),
        (333, 512, 1, 48, 64, "shared", "float16", 0.0, True),
        (197, 197, 1, 64, 64, None, "bfloat16", 1000.0, False),
    )
]


def _check(case, draw, in_float64, assert_close):
    features, batch, queries, keys, heads, dim, value_dim, masked, dtype, mean, is_sum = case
    random = draw(queries + keys, dtype)
    query = random.normal(batch, queries, heads, dim)
    x = random.keys_and_values(batch, keys, heads, dim, value_dim, masked=masked, mean=mean)
    scale = jnp.asarray(random.random.uniform(0.1, 0.3, (batch, heads)), jnp.float32)
    out, sums, key_pivot, value_pivot = fused_cumulant(
        features, query, x.key, x.value, x.mask, scale, reduction_is_sum=is_sum
    )

    def truth(query, key, value, scale):
        means = [masked_mean(y, x.mask) for y in (key, value)]
        sums = sum_moments(features, key, value, x.mask, key_pivot=means[0], value_pivot=means[1])
        matrix = read_out_matrix(
            features,
            sums,
            means[1],
            dim=dim,
            scale=scale[..., None, None],
            reduction_is_sum=is_sum,
        )
        return read_out(features, query, matrix), *means

    def raw(key, value, key_pivot, value_pivot):
        return sum_moments(
            features, key, value, x.mask, key_pivot=key_pivot, value_pivot=value_pivot
        )

    expected, key_mean, _ = in_float64(truth, query, x.key, x.value, scale)
    assert_close(dtype, out=(out, expected))
    expected_sums = in_float64(raw, x.key, x.value, key_pivot, value_pivot)
    assert_close(dtype, sums=(sums, expected_sums))
    # Near the mean: at it where there is a mask, and of the first 128 tokens otherwise.
    assert np.abs(np.asarray(key_pivot) - key_mean).max() < (1.0 if mean == 0 else 2.0)
    if masked == "heads":
        assert not np.any(np.asarray(out)[:, :, 0])
        assert not np.any(np.asarray(key_pivot)[:, 0])


@pytest.mark.parametrize("case", CUMULANTS, ids=case_id)
def test_cumulants(case, interpreter, draw, in_float64, assert_close):
    _check(case, draw, in_float64, assert_close)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CUMULANTS, ids=case_id)
def test_cumulants_in_all_shapes(case, interpreter, draw, in_float64, assert_close):
    _check(case, draw, in_float64, assert_close)


@pytest.mark.parametrize(
    ("features", "queries", "keys", "masked", "dtype"),
    [(elu1, 70, 130, "shared", "bfloat16"), (jnp.exp, 8, 136, None, "float16")]
    + [
        pytest.param(features, *shape, marks=pytest.mark.slow)
        for features in (elu1, jax.nn.relu, jnp.exp)
        for shape in ((197, 197, None, "bfloat16"), (512, 333, "shared", "float16"))
    ],
)
def test_linear_attention(
    features, queries, keys, masked, dtype, interpreter, draw, in_float64, assert_close
):
    random = draw(queries, dtype)
    query = random.normal(1, queries, 2, 48) / 4
    x = random.keys_and_values(1, keys, 2, 48, 64, masked=masked)
    out, sums = fused_linear(features, query, x.key, x.value, x.mask, normalizer_eps=0.1)

    def truth(query, key, value):
        pivots = [jnp.zeros((1, 2, size)) for size in (48, 64)]
        sums = sum_moments(features, key, value, x.mask, key_pivot=pivots[0], value_pivot=pivots[1])
        return read_out(features, query, sums, normalizer_eps=0.1), sums

    expected, expected_sums = in_float64(truth, query, x.key, x.value)
    assert_close(dtype, out=(out, expected), sums=(sums, expected_sums))


def test_weights_sum_to_one(interpreter, draw):
    """Equal values come back as they are, whatever the keys and however they are rounded."""
    random = draw(3)
    query = 3 * random.normal(1, 64, 1, 64)
    x = random.keys_and_values(1, 100, 1, 64, 64)
    value = jnp.full_like(x.value, 1.5)
    scale = jnp.full((1, 1), 0.125, jnp.float32)
    out, sums, *_ = fused_cumulant(
        THIRD, query, x.key, value, None, scale, reduction_is_sum=False, return_sums=False
    )
    assert sums is None
    np.testing.assert_allclose(np.asarray(out, np.float64), 1.5, rtol=2**-9)
