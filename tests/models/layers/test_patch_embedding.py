"""The patch embedding is a strided convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.patch_embedding import PatchEmbedding


@pytest.mark.parametrize("patch_size", [(2, 4), (8, 12)])
@pytest.mark.parametrize("seed", [0])
def test_equals_the_strided_convolution(seed, patch_size):
    types = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}
    layer = PatchEmbedding(patch_size=patch_size, channels=3, dim=5, rngs=nnx.Rngs(seed), **types)
    layer.bias[...] = jnp.arange(5.0)
    images = jax.random.normal(jax.random.key(seed), (2, 8, 12, 3))
    want = jax.lax.conv_general_dilated(
        images, layer.kernel[...], patch_size, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    want = want.reshape(2, -1, 5) + jnp.arange(5.0)
    np.testing.assert_allclose(layer(images), want, rtol=0, atol=1e-5)


def test_kernel_is_lecun_normal_over_the_pixels_of_a_patch():
    types = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}
    layer = PatchEmbedding(patch_size=(8, 8), channels=3, dim=512, rngs=nnx.Rngs(0), **types)
    assert np.std(layer.kernel[...]) == pytest.approx((8 * 8 * 3) ** -0.5, rel=0.02)
