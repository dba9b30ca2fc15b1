"""The sparse-coding step of CRATE and its block, against loops and against what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.ista import ISTA, CRATEBlock

TYPES = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}


@pytest.mark.parametrize("seed", [0])
def test_against_loops(seed):
    """The published form: x + t (Dᵀ x − Dᵀ D x) − t s, cut at zero, every token a column."""
    random = np.random.default_rng(seed)
    step_size, sparsity = 0.3, 0.2
    layer = ISTA(dim=5, step_size=step_size, sparsity=sparsity, rngs=nnx.Rngs(seed), **TYPES)
    dictionary = np.asarray(layer.kernel[...], np.float64)
    x = random.standard_normal((2, 4, 5))
    got = layer(jnp.asarray(x, jnp.float32))
    for batch in range(2):
        for token in range(4):
            z = x[batch, token]
            gradient = dictionary.T @ z - dictionary.T @ (dictionary @ z)
            want = np.maximum(z + step_size * gradient - step_size * sparsity, 0)
            np.testing.assert_allclose(got[batch, token], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_it_lowers_what_it_minimises(seed):
    """A step below 1 / |D|² from x lowers ½ |x − D z|² + s |z|₁ over z ≥ 0, where x is possible."""
    random = np.random.default_rng(seed)
    layer = ISTA(dim=6, step_size=0.01, sparsity=0.2, rngs=nnx.Rngs(seed), **TYPES)
    dictionary = np.asarray(layer.kernel[...], np.float64)
    assert 1 / np.linalg.norm(dictionary, 2) ** 2 > 0.01
    x = np.abs(random.standard_normal((10, 6)))
    z = np.asarray(layer(jnp.asarray(x, jnp.float32)), np.float64)

    def objective(z):
        return 0.5 * np.sum((x - z @ dictionary.T) ** 2, -1) + 0.2 * np.sum(np.abs(z), -1)

    assert (objective(z) < objective(x)).all()


def test_a_higher_sparsity_gives_more_zeros():
    x = jax.random.normal(jax.random.key(0), (100, 32))
    zeros = [
        int((ISTA(dim=32, step_size=0.1, sparsity=s, rngs=nnx.Rngs(0), **TYPES)(x) == 0).sum())
        for s in (0.0, 1.0, 10.0)
    ]
    assert zeros[0] < zeros[1] < zeros[2]


class Doubling(nnx.Module):
    """Stands where the attention layer does."""

    def __call__(self, x, *, train=False, rng=None):
        return 2 * x


@pytest.mark.parametrize("layer_scale", [None, 0.5])
def test_the_block(layer_scale):
    block = CRATEBlock(
        Doubling(),
        dim=6,
        step_size=0.1,
        sparsity=0.1,
        layer_scale=layer_scale,
        rngs=nnx.Rngs(0),
        **TYPES,
    )
    x = np.random.default_rng(0).standard_normal((2, 5, 6)) + 3

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    out, attended = block(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(attended, 2 * norm(x), rtol=0, atol=1e-5)
    middle = x + (layer_scale or 1.0) * 2 * norm(x)
    want = block.ista(jnp.asarray(norm(middle), jnp.float32))
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


def test_the_dictionary_starts_as_published():
    kernel = np.asarray(
        ISTA(dim=256, step_size=0.1, sparsity=0.1, rngs=nnx.Rngs(0), **TYPES).kernel[...]
    )
    bound = (6 / 256) ** 0.5
    assert 0.999 * bound < np.abs(kernel).max() <= bound
