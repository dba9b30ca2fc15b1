"""Sums of moments and the pass back through them, against float64 on the same rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import PolynomialFeatures, elu1
from cumulant_jax.kernels import sum_moments as xla_sum_moments
from cumulant_jax.kernels.mosaic_gpu import split_moments, sum_moments, sum_moments_backward
from tests.kernels.case_id import case_id

ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SECOND, THIRD, FOURTH = (PolynomialFeatures(order) for order in (2, 3, 4))

# features, batch, tokens, heads, dim, value_dim, masked, dtype, mean of keys and values
CASES = [
    (THIRD, 1, 1, 2, 64, 64, None, "bfloat16", 0.0),
    (SECOND, 2, 7, 1, 16, 24, None, "float16", 0.0),
    (THIRD, 2, 197, 2, 64, 64, "heads", "bfloat16", 0.0),
    (THIRD, 1, 200, 1, 48, 128, "shared", "bfloat16", 1000.0),
    (FOURTH, 1, 100, 1, 24, 64, "shared", "bfloat16", 0.0),
    (elu1, 1, 136, 1, 64, 48, "shared", "float16", 0.0),
]
ALL = [
    (features, 1, tokens, heads, dim, value_dim, masked, dtype, mean)
    for features in (SECOND, THIRD, elu1, jax.nn.relu, jnp.exp)
    for tokens, heads, dim, value_dim, masked, dtype, mean in (
        (1, 2, 16, 16, None, "bfloat16", 0.0),
        (7, 1, 24, 100, "shared", "bfloat16", 0.0),
        (100, 3, 48, 64, "heads", "float16", 0.0),
        (197, 2, 100, 24, "heads", "bfloat16", 0.0),
        (1000, 1, 64, 128, None, "bfloat16", 0.0),
        (1000, 2, 128, 128, "heads", "bfloat16", 0.0),
        (333, 1, 128, 96, "shared", "float16", 0.0),
    )
] + [
    (THIRD, 1, 1000, 1, 64, 64, None, "bfloat16", 1000.0),
    (THIRD, 2, 197, 1, 100, 128, "shared", "float16", 1000.0),
    (FOURTH, 1, 1000, 2, 64, 64, "heads", "bfloat16", 0.0),
    (FOURTH, 1, 197, 1, 16, 48, None, "bfloat16", 0.0),
]


def _truth(features, mask):
    def run(key, value, key_pivot, value_pivot):
        return xla_sum_moments(
            features, key, value, mask, key_pivot=key_pivot, value_pivot=value_pivot
        )

    return run


def _magnitudes(features, mask):
    """The same sums of absolute values."""

    def run(key, value, key_pivot, value_pivot):
        value = jnp.abs(value - value_pivot[:, None])
        return xla_sum_moments(
            lambda x: jnp.abs(features(x)),
            key,
            value,
            mask,
            key_pivot=key_pivot,
            value_pivot=jnp.zeros_like(value_pivot),
        )

    return run


def _split(features, sums, dim):
    """The moments by name: blocks of features, their sums, the row of the constant."""
    rows = [("linear", 0), ("square", 1), ("cube", 2)][: getattr(features, "order", 2) - 1]
    named = {}
    for name, degree in rows:
        block = sums[..., degree * dim : (degree + 1) * dim, :]
        named[name], named[f"sum_of_{name}"] = block[..., :-1], block[..., -1]
    if isinstance(features, PolynomialFeatures):
        named["sum_of_values"], named["count"] = sums[..., -1, :-1], sums[..., -1, -1]
    return named


def _check(case, draw, in_float64, assert_close):
    features, batch, tokens, heads, dim, value_dim, masked, dtype, mean = case
    random = draw(tokens + dim, dtype)
    x = random.keys_and_values(batch, tokens, heads, dim, value_dim, masked=masked, mean=mean)
    inputs = (x.key, x.value, x.mask, x.key_pivot, x.value_pivot)
    truth = _truth(features, x.mask)

    sums = sum_moments(features, *inputs)
    expected = in_float64(truth, x.key, x.value, x.key_pivot, x.value_pivot)
    bounds = in_float64(_magnitudes(features, x.mask), x.key, x.value, x.key_pivot, x.value_pivot)
    got, want, bound = (_split(features, s, dim) for s in (np.asarray(sums), expected, bounds))
    for name in want:
        # Every feature is rounded once, and nothing else is; the sums are in float32, about zero.
        allowed = ROUNDOFF[dtype] * bound[name] + 1e-6 * (1 + abs(mean)) * tokens
        assert np.all(np.abs(got[name] - want[name]) <= allowed), name

    sums_bar = random.normal(*sums.shape, dtype="float32")
    key_bar, value_bar = sum_moments_backward(features, *inputs, sums_bar)
    assert key_bar.dtype == value_bar.dtype == x.key.dtype

    def pull_back(key, value, key_pivot, value_pivot, bar):
        return jax.vjp(lambda k, v: truth(k, v, key_pivot, value_pivot), key, value)[1](bar)

    expected = in_float64(pull_back, x.key, x.value, x.key_pivot, x.value_pivot, sums_bar)
    expected = [np.where(np.isnan(bar), 0, bar) for bar in expected]  # elu1 and exp of masked keys
    assert_close(dtype, key_bar=(key_bar, expected[0]), value_bar=(value_bar, expected[1]))
    if masked:
        for bar in (key_bar, value_bar):
            assert not np.any(np.asarray(jnp.where(x.mask[..., None], 0, bar)))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_moments_and_their_gradients(case, interpreter, draw, in_float64, assert_close):
    _check(case, draw, in_float64, assert_close)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=case_id)
def test_moments_and_their_gradients_in_all_shapes(
    case, interpreter, draw, in_float64, assert_close
):
    _check(case, draw, in_float64, assert_close)


def test_sums_of_features_are_of_the_rounded_features(interpreter, draw):
    """The weights of the expansion sum to one only if both sums see the same numbers."""
    x = draw(0).keys_and_values(1, 70, 1, 16, 16)
    sums = sum_moments(THIRD, x.key, x.value, None, x.key_pivot, x.value_pivot)
    centred = x.key.astype(jnp.float32)[0, :, 0] - x.key_pivot[0, 0]
    for degree, power in enumerate((centred, centred * centred)):
        rounded = np.asarray(power.astype(jnp.bfloat16), np.float64)
        got = np.asarray(sums)[0, 0, degree * 16 : (degree + 1) * 16, -1]
        np.testing.assert_allclose(got, rounded.sum(0), rtol=1e-6, atol=1e-5)


def test_split_sums_add_up_and_count_their_tokens(interpreter, draw):
    x = draw(1).keys_and_values(1, 300, 2, 16, 16, masked="heads")
    inputs = (THIRD, x.key, x.value, x.mask, x.key_pivot, x.value_pivot)
    parts = np.asarray(split_moments(*inputs, tiles_per_split=2))
    assert parts.shape[0] == 3
    mask = np.pad(np.asarray(x.mask), [(0, 0), (0, 84), (0, 0)]).reshape(3, 128, 2)
    np.testing.assert_array_equal(parts[:, 0, :, -1, -1], mask.sum(1))
    np.testing.assert_allclose(parts.sum(0), sum_moments(*inputs), rtol=1e-4, atol=1e-4)


def _splits(features, tokens, heads, dim, value_dim):
    key, value = (
        jax.ShapeDtypeStruct((1, tokens, heads, d), jnp.bfloat16) for d in (dim, value_dim)
    )
    pivots = (jax.ShapeDtypeStruct((1, heads, d), jnp.float32) for d in (dim, value_dim))

    def run(key, value, *pivots):
        return split_moments(features, key, value, None, *pivots)

    return jax.eval_shape(run, key, value, *pivots).shape[0]


@pytest.mark.parametrize(
    "case",
    [
        # features, tokens, dim, value_dim, float32 numbers that the kernel writes per split
        (THIRD, 4096, 64, 64, 2 * 64 * 64),
        (THIRD, 4096, 128, 128, 2 * 128 * 128),
        (FOURTH, 4096, 64, 64, 3 * 64 * 64),
        (THIRD, 4096, 48, 128, 2 * 64 * 128),
        (elu1, 4096, 64, 64, 64 * 64),
    ],
    ids=case_id,
)
def test_splits_write_at_most_a_quarter_of_what_they_read(case):
    features, tokens, dim, value_dim, written = case
    splits = _splits(features, tokens, 12, dim, value_dim)
    read = 2 * tokens * (dim + value_dim)
    assert splits > 1
    assert 4 * splits * 4 * written <= read


def test_one_head_is_split_over_the_whole_chip():
    assert _splits(THIRD, 32768, 1, 64, 64) >= 64
    assert _splits(THIRD, 65536, 1, 64, 64) >= 128
