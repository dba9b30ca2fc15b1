"""The causal TPU kernels, interpreted, against the float64 scan: outputs and gradients by name."""

import functools

import jax
import jax.numpy as jnp
import pytest

from cumulant_jax import kernels as xla
from cumulant_jax.kernels import CumulantReading, NormalizedReading, PolynomialFeatures, elu1
from cumulant_jax.kernels import mosaic_tpu as tpu
from cumulant_jax.kernels.causal import causal_read_out
from tests.kernels.mosaic_tpu.interpreted import (
    check,
    interpreted,
    normal,
    poison,
    random_mask,
    wide,
)

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
SMALL = tpu.BlockSizes(causal_tokens=64, chunk=32)
WHOLE = tpu.BlockSizes()


def _truth(features, reduction, mask, pivots, query, key, value, sums, scale):
    if isinstance(features, PolynomialFeatures):
        reading = CumulantReading(features, reduction_is_sum=reduction == "sum")
    else:
        reading = NormalizedReading(features, normalizer_eps=1e-6)
    return causal_read_out(reading, query, key, value, mask, scale, sums, *pivots)


# batch, tokens, key heads, query heads of each, dim, value_dim, dtype, features, mask, reduction,
# block sizes, whether tokens came before, mean of the keys
CASES = [
    (2, 197, 3, 1, 64, 64, "float32", PolynomialFeatures(3), 1, "mean", WHOLE, True, 0),
    (1, 100, 2, 2, 24, 48, "float32", PolynomialFeatures(2), 2, "sum", SMALL, True, 0),
    (1, 140, 2, 1, 64, 64, "bfloat16", PolynomialFeatures(3), 0, "mean", SMALL, False, 0),
    (1, 70, 2, 1, 48, 64, "float32", elu1, 1, None, SMALL, True, 0),
    slow((1, 1, 1, 1, 16, 16, "float32", PolynomialFeatures(2), 0, "mean", WHOLE, False, 0)),
    slow((1, 7, 1, 1, 128, 128, "float32", jnp.exp, 0, None, WHOLE, True, 0)),
    slow((1, 150, 2, 3, 64, 64, "float32", PolynomialFeatures(4), 2, "mean", SMALL, False, 0)),
    slow((1, 1000, 2, 1, 24, 8, "float32", PolynomialFeatures(3), 0, "sum", SMALL, True, 0)),
    slow((1, 300, 2, 2, 128, 128, "bfloat16", PolynomialFeatures(3), 1, "mean", WHOLE, True, 0)),
    slow((1, 130, 5, 1, 32, 32, "bfloat16", elu1, 5, None, WHOLE, False, 0)),
    slow((1, 200, 3, 2, 100, 64, "float32", PolynomialFeatures(2), 3, "mean", WHOLE, True, 0)),
    slow((1, 130, 2, 1, 64, 64, "float32", PolynomialFeatures(3), 0, "mean", WHOLE, True, 1000)),
    slow((1, 200, 2, 1, 16, 16, "float32", jax.nn.relu, 0, None, SMALL, True, 0)),
]


@pytest.mark.parametrize("case", CASES)
def test_causal(case):
    batch, tokens, heads, groups, dim, value_dim, dtype, features, *rest = case
    masked, reduction, sizes, before, mean = rest
    make = functools.partial(normal, dtype=dtype)
    mask = random_mask(0, batch, tokens, masked)
    query = make(1, batch, tokens, heads * groups, dim)
    key = poison(make(2, batch, tokens, heads, dim, mean=mean), mask)
    value = poison(make(3, batch, tokens, heads, value_dim, mean=0.3), mask)
    pivots = mean + 0.1 * normal(4, batch, heads, dim), 0.1 * normal(5, batch, heads, value_dim)
    if reduction is None:
        pivots = tuple(jnp.zeros_like(x) for x in pivots)
    earlier = normal(6, batch, 5, heads, dim, mean=mean), normal(7, batch, 5, heads, value_dim)
    sums = xla.sum_moments(features, *earlier, None, key_pivot=pivots[0], value_pivot=pivots[1])
    sums = sums if before else jnp.zeros_like(sums)
    scale = 0.2 + 0.01 * normal(8, batch, heads)
    out_bar = make(9, batch, tokens, heads * groups, value_dim)
    sums_bar = 0.1 * normal(10, *sums.shape)
    tokens_in = features, query, key, value, mask, sums
    with interpreted():
        if reduction is None:
            options = {"normalizer_eps": 1e-6, "block_sizes": sizes}
            out, after, states = tpu.causal_linear(*tokens_in, save_states=True, **options)
            bars = tpu.causal_linear_backward(*tokens_in, states, out_bar, sums_bar, **options)
        else:
            options = {"reduction_is_sum": reduction == "sum", "block_sizes": sizes}
            inputs = *tokens_in, *pivots, scale
            out, after, states = tpu.causal_cumulant(*inputs, save_states=True, **options)
            bars = tpu.causal_cumulant_backward(*inputs, states, out_bar, sums_bar, **options)
    with jax.enable_x64(True):
        truth = functools.partial(_truth, features, reduction, mask, wide(*pivots))
        want, pull = jax.vjp(truth, *wide(query, key, value, sums, scale))
        want_bars = list(pull(tuple(wide(out_bar, sums_bar))))
        if reduction is None:
            want_bars.pop()
        else:  # The count of tokens is a constant.
            want_bars[3] = want_bars[3].at[..., -1, -1].set(0)
        names = ["out", "after", "query", "key", "value", "sums", "scale"][: 2 + len(want_bars)]
        check(" ".join(names), (out, after, *bars), (*want, *want_bars), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_and_resume(dtype):
    """Two halves with the state carried over are one run, however the halves fall on blocks."""
    features, cut = PolynomialFeatures(3), 45
    query, key, value = (normal(seed, 1, 100, 2, 32, dtype=dtype) for seed in range(3))
    pivots = jnp.zeros((1, 2, 32)), jnp.zeros((1, 2, 32))
    sums, scale = jnp.zeros((1, 2, 65, 33)), jnp.full((1, 2), 0.2)

    def run(part, sums):
        arrays = (x[:, part] for x in (query, key, value))
        return tpu.causal_cumulant(
            features, *arrays, None, sums, *pivots, scale, reduction_is_sum=False, block_sizes=SMALL
        )[:2]

    with interpreted():
        whole, after = run(slice(None), sums)
        first, between = run(slice(cut), sums)
        second, end = run(slice(cut, None), between)
    halves = jnp.concatenate([first, second], axis=1)
    check("out after", (halves, end), (whole.astype(jnp.float32), after), dtype)
