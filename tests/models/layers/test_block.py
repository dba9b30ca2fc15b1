"""The block and its MLP against NumPy, and LayerScale."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.block import Block
from cumulant_jax.models.layers.mlp import MLP

TYPES = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}


class Doubling(nnx.Module):
    """Stands where the attention layer does."""

    def __call__(self, x, *, train=False, rng=None):
        return 2 * x


def numpy_norm(x):
    x = np.asarray(x, np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_branches_of_a_block(layer_scale):
    rngs = nnx.Rngs(0)
    block = Block(Doubling(), dim=6, hidden_dim=9, layer_scale=layer_scale, rngs=rngs, **TYPES)
    x = jax.random.normal(jax.random.key(0), (2, 5, 6)) + 3
    out, attended = block(x)
    scale = 1.0 if layer_scale is None else layer_scale
    np.testing.assert_allclose(attended, 2 * numpy_norm(x), rtol=0, atol=1e-5)
    middle = np.asarray(x, np.float64) + scale * 2 * numpy_norm(x)
    want = middle + scale * np.asarray(block.mlp(jnp.asarray(numpy_norm(middle), jnp.float32)))
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


def test_mlp_uses_the_exact_gelu():
    mlp = MLP(dim=4, hidden_dim=7, rngs=nnx.Rngs(0), **TYPES)
    mlp.expand.kernel[...] = jax.random.normal(jax.random.key(0), (4, 7))
    mlp.contract.kernel[...] = jax.random.normal(jax.random.key(1), (7, 4))
    x = np.asarray(jax.random.normal(jax.random.key(2), (3, 4)))
    hidden = x @ np.asarray(mlp.expand.kernel[...])
    gelu = np.vectorize(lambda h: 0.5 * h * (1 + math.erf(h / math.sqrt(2))))(hidden)
    np.testing.assert_allclose(
        mlp(jnp.asarray(x)), gelu @ mlp.contract.kernel[...], rtol=0, atol=1e-5
    )


def test_norms_keep_their_digits_beside_a_large_mean():
    """The variance is taken in two passes: E[x^2] - E[x]^2 would be off by more than itself."""
    block = Block(Doubling(), dim=64, hidden_dim=8, rngs=nnx.Rngs(0), **TYPES)
    x = (jax.random.normal(jax.random.key(0), (1, 3, 64)) + 4096).astype(jnp.float32)
    np.testing.assert_allclose(block.norm1(x), numpy_norm(x), rtol=0, atol=2e-3)
