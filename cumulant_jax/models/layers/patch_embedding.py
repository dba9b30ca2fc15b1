"""Images to tokens: one linear map of each patch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import bias_init, patch_init, weight_init
from cumulant_jax.models.layers.norms import layer_norm


def patchify(images: Array, patch_size: tuple[int, int]) -> Array:
    """Cuts images into patches that do not overlap.

    Args:
      images: [batch, height, width, channels]; height and width are multiples of the patch size.
      patch_size: (height, width) of a patch in pixels.

    Returns:
      [batch, patches, patch height * patch width * channels], patches and pixels row by row.

    >>> patchify(jnp.zeros((2, 32, 48, 3)), (16, 8)).shape
    (2, 12, 384)
    """
    batch, height, width, channels = images.shape
    rows, columns = patch_size
    grid = (height // rows, width // columns)
    patches = images.reshape(batch, grid[0], rows, grid[1], columns, channels)
    pixels = rows * columns * channels
    return patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, grid[0] * grid[1], pixels)


class PatchEmbedding(nnx.Module):
    """Maps every patch of an image linearly to a token, patches row by row.

    This is the strided convolution of the ViT paper (arXiv 2010.11929), with its kernel [patch
    height, patch width, channels, dim], computed as one matrix product over the pixels of each
    patch: the patches do not overlap, so the two are the same sum.
    """

    def __init__(
        self,
        *,
        patch_size: tuple[int, int],
        channels: int,
        dim: int,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer.

        Args:
          patch_size: (height, width) of a patch in pixels.
          channels: channels of the images.
          dim: features of a token.
          dtype: dtype of the computation and of the tokens.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        self.kernel = nnx.Param(
            patch_init(rngs.params(), (*patch_size, channels, dim), param_dtype)
        )
        self.bias = nnx.Param(bias_init(rngs.params(), (dim,), param_dtype))
        self.patch_size = patch_size
        self.dtype = dtype

    @jax.named_scope("patch_embedding")
    def __call__(self, images: Array) -> Array:
        """Embeds a batch of images.

        Args:
          images: [batch, height, width, channels]; height and width are multiples of the patch
            size.

        Returns:
          Tokens [batch, (height / patch height) * (width / patch width), dim], row by row.
        """
        patches = patchify(jnp.asarray(images, self.dtype), self.patch_size)
        kernel = self.kernel[...].astype(self.dtype).reshape(patches.shape[-1], -1)
        return patches @ kernel + self.bias[...].astype(self.dtype)


class NormedPatchEmbedding(nnx.Module):
    """Layer norm of a patch's pixels, a linear map, layer norm of the token, as in CRATE."""

    def __init__(
        self,
        *,
        patch_size: tuple[int, int],
        channels: int,
        dim: int,
        eps: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer; arguments as in `PatchEmbedding`, and the epsilon of the norms."""
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        pixels = patch_size[0] * patch_size[1] * channels
        self.pixel_norm = layer_norm(pixels, eps=eps, **types)
        self.projection = nnx.Linear(
            pixels, dim, kernel_init=weight_init, bias_init=bias_init, **types
        )
        self.token_norm = layer_norm(dim, eps=eps, **types)
        self.patch_size = patch_size

    @jax.named_scope("patch_embedding")
    def __call__(self, images: Array) -> Array:
        """Embeds images [batch, height, width, channels], as `PatchEmbedding` does."""
        patches = patchify(images, self.patch_size)
        return self.token_norm(self.projection(self.pixel_norm(patches)))
