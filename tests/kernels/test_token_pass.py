"""The chunked pass equals the unchunked one, outputs and derivatives, for every way to cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import chunk_length, token_pass

LENGTH = 23


def body(tokens, mask, shared):
    x, y = tokens
    if mask is not None:
        x = jnp.where(mask[..., None], x, 0)
    per_token = jnp.sin(x) * shared["scale"] + y
    return {"out": per_token}, (jnp.sum(x * y, axis=-3), jnp.sum(y * shared["scale"]))


def arrays(seed=0):
    random = np.random.default_rng(seed)
    x, y = (jnp.asarray(random.standard_normal((2, LENGTH, 3, 4)), jnp.float64) for _ in range(2))
    mask = jnp.asarray(random.random((2, LENGTH, 1)) < 0.5)
    return (x, y), mask, {"scale": jnp.asarray(random.standard_normal((2, 1, 3, 1)), jnp.float64)}


@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_change_nothing(chunk, masked, x64):
    tokens, mask, shared = arrays()
    mask = mask if masked else None

    def run(function):
        def apply(tokens, shared):
            return function(tokens, mask, shared)

        out, pull_back = jax.vjp(apply, tokens, shared)
        return out, pull_back(jax.tree.map(jnp.cos, out))

    actual = jax.jit(lambda: run(functools.partial(token_pass, body, chunk)))()
    expected = jax.jit(lambda: run(body))()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), actual, expected
    )


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 197, 1000, 1023, 4096, 4099, 65536])
@pytest.mark.parametrize("bytes_per_token", [4, 3000, 10**7])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_chunk_lengths_cover_the_tokens_almost_evenly(tokens, bytes_per_token, platform):
    chunk = chunk_length(tokens, bytes_per_token, platform=platform)
    assert 1 <= chunk <= tokens
    count = -(-tokens // chunk)
    assert count * chunk - tokens < count, "all chunks are full but for a few tokens"
    if chunk < tokens and platform == "cpu":
        assert 64 <= chunk <= 1024
