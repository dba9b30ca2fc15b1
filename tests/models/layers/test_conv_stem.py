"""The convolutional stem against loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.conv_stem import ConvStem

TYPES = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}


def convolve(x, kernel):
    """3x3, stride 2, one row and column of zeros on every side."""
    batch, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    out = np.zeros((batch, -(-height // 2), -(-width // 2), kernel.shape[-1]))
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            out[:, i, j] = np.einsum("bhwc,hwcd->bd", window, kernel)
    return out


@pytest.mark.parametrize(
    ("patch", "size", "grid"),
    [(2, (4, 6), (2, 3)), (4, (8, 8), (2, 2)), (4, (9, 6), (3, 2)), (8, (17, 8), (3, 1))],
)
@pytest.mark.parametrize("seed", [0])
def test_against_loops(seed, patch, size, grid):
    random = np.random.default_rng(seed)
    stem = ConvStem(patch_size=patch, channels=2, dim=8, rngs=nnx.Rngs(seed), **TYPES)
    x = random.standard_normal((2, *size, 2))
    got = stem(jnp.asarray(x, jnp.float32))
    gelu = np.vectorize(lambda h: 0.5 * h * (1 + math.erf(h / math.sqrt(2))))
    widths = [layer.kernel.shape[-1] for layer in stem.convolutions]
    assert widths == [8 // 2**i for i in reversed(range(len(widths)))]
    assert 2 ** len(widths) == patch
    for index, layer in enumerate(stem.convolutions):
        x = x if index == 0 else gelu(x)
        x = convolve(x, np.asarray(layer.kernel[...], np.float64)) / np.sqrt(1 + 1e-5)
    assert x.shape[1:3] == grid
    np.testing.assert_allclose(got, x.reshape(2, -1, 8), rtol=0, atol=1e-5)


def test_kernels_start_as_in_pytorch():
    stem = ConvStem(patch_size=4, channels=3, dim=256, rngs=nnx.Rngs(0), **TYPES)
    kernel = np.asarray(stem.convolutions[1].kernel[...])
    bound = (9 * 128) ** -0.5
    assert 0.999 * bound < np.abs(kernel).max() <= bound
    assert kernel.std() == pytest.approx(bound / 3**0.5, rel=0.01)


def test_training_moves_the_statistics_of_every_norm():
    stem = ConvStem(patch_size=4, channels=3, dim=8, rngs=nnx.Rngs(0), **TYPES)
    stem(jax.random.normal(jax.random.key(0), (2, 8, 8, 3)), train=True)
    for norm in stem.norms:
        assert np.abs(norm.var[...] - 1).max() > 1e-3
