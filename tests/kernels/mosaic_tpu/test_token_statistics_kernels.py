"""The token statistics TPU kernels, interpreted, against the float64 functions, by name."""

import functools

import jax
import jax.numpy as jnp
import pytest

from cumulant_jax import token_statistics_attention
from cumulant_jax.attention.token_statistics import TokenStatisticsState
from cumulant_jax.kernels import mosaic_tpu as tpu
from tests.kernels.mosaic_tpu.interpreted import check, interpreted, normal, random_mask, wide

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
WHOLE = tpu.BlockSizes()
SMALL = tpu.BlockSizes(statistics_elements=128 * 120)
SMALL_CHUNKS = tpu.BlockSizes(statistics_elements=64 * 100, chunk=32)


def _inputs(batch, tokens, heads, dim, dtype, masked, factor):
    w = normal(1, batch, tokens, heads, dim, dtype=dtype) * factor
    out_bar = normal(2, batch, tokens, heads, dim, dtype=dtype)
    mask = None
    if masked:
        mask = random_mask(0, batch, tokens, 1)[..., 0]
        w = jnp.where(mask[..., None, None], w, jnp.nan)
    return w.astype(dtype), out_bar, mask


# batch, tokens, heads, dim, dtype, whether masked, factor on the tokens, block sizes
CASES = [
    (2, 197, 3, 64, "float32", True, 1, WHOLE),
    (2, 300, 5, 24, "float32", True, 1, SMALL),
    slow((1, 300, 5, 24, "float32", False, 1, SMALL)),
    slow((1, 197, 4, 64, "bfloat16", False, 1, WHOLE)),
    slow((1, 1000, 4, 32, "bfloat16", True, 1, SMALL)),
    slow((1, 7, 3, 10, "float32", False, 1, WHOLE)),
    slow((1, 1, 2, 8, "float32", False, 1, WHOLE)),
    slow((1, 20, 3, 8, "float32", False, 0, WHOLE)),
    slow((1, 300, 3, 8, "float32", False, 0, SMALL)),
]


@pytest.mark.parametrize("case", CASES)
def test_token_statistics(case):
    *shape, dtype, masked, factor, sizes = case
    w, out_bar, mask = _inputs(*shape, dtype, masked, factor)
    temperature = 1 + normal(3, shape[2])
    with interpreted():
        out, sums = tpu.token_statistics(w, temperature, mask, block_sizes=sizes)
        bars = tpu.token_statistics_backward(w, temperature, mask, sums, out_bar, block_sizes=sizes)
    with jax.enable_x64(True):
        want, pull = jax.vjp(
            lambda w, t: token_statistics_attention(w, temperature=t, mask=mask),
            *wide(w, temperature),
        )
        check("out w temperature", (out, *bars), (want, *pull(*wide(out_bar))), dtype)


# batch, tokens, heads, dim, dtype, masked, factor, block sizes, with a bias, tokens before
CAUSAL = [
    (2, 70, 5, 24, "float32", True, 1, SMALL_CHUNKS, True, True),
    slow((2, 197, 3, 64, "float32", True, 1, WHOLE, True, True)),
    slow((1, 100, 5, 24, "float32", False, 1, SMALL_CHUNKS, False, False)),
    slow((1, 100, 4, 64, "bfloat16", False, 1, WHOLE, True, False)),
    slow((1, 7, 3, 10, "float32", False, 1, WHOLE, False, True)),
    slow((1, 1, 3, 10, "float32", False, 1, WHOLE, True, True)),
    slow((1, 20, 3, 8, "float32", False, 0, WHOLE, True, False)),
]


@pytest.mark.parametrize("case", CAUSAL)
def test_causal_token_statistics(case):
    batch, tokens, heads, dim, dtype, masked, factor, sizes, biased, before = case
    w, out_bar, mask = _inputs(batch, tokens, heads, dim, dtype, masked, factor)
    temperature = 1 + 0.1 * normal(3, heads)
    bias = 0.1 * normal(4, heads, tokens) if biased else None
    shapes = (batch, heads, dim), (batch, heads, dim), (batch, heads)
    state = tuple(before * jnp.abs(normal(5 + i, *shape)) for i, shape in enumerate(shapes))
    state_bar = tuple(0.1 * normal(8 + i, *shape) for i, shape in enumerate(shapes))
    with interpreted():
        out, after, states = tpu.causal_token_statistics(
            w, temperature, mask, bias, state, save_states=True, block_sizes=sizes
        )
        bars = tpu.causal_token_statistics_backward(
            w, temperature, mask, bias, states, out_bar, state_bar, block_sizes=sizes
        )

    def truth(w, temperature, state, *bias):
        out, state = token_statistics_attention(
            w,
            temperature=temperature,
            mask=mask,
            is_causal=True,
            denominator_bias=bias[0] if bias else None,
            initial_state=TokenStatisticsState(*state),
            return_state=True,
        )
        return out, tuple(state)

    with jax.enable_x64(True):
        biases = wide(bias) if biased else ()
        inputs = *wide(w, temperature), tuple(wide(*state)), *biases
        (want, want_after), pull = jax.vjp(truth, *inputs)
        w_bar, temperature_bar, before_bar, *bias_bar = pull(
            (*wide(out_bar), tuple(wide(*state_bar)))
        )
        names = "out energy weighted membership w temperature w_energy w_weighted w_membership"
        got = [out, *after, *bars[:2], *bars[3]]
        want = [want, *want_after, w_bar, temperature_bar, *before_bar]
        if biased:
            names, got, want = f"{names} bias", [*got, bars[2]], [*want, *bias_bar]
        check(names, got, want, dtype)
