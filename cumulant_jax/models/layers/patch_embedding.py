"""Images to tokens: one linear map of each patch."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import bias_init, patch_init


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
        batch, height, width, channels = images.shape
        rows, columns = self.patch_size
        grid = (height // rows, width // columns)
        patches = jnp.asarray(images, self.dtype).reshape(
            batch, grid[0], rows, grid[1], columns, channels
        )
        pixels = rows * columns * channels
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, grid[0] * grid[1], pixels)
        kernel = self.kernel[...].astype(self.dtype).reshape(pixels, -1)
        return patches @ kernel + self.bias[...].astype(self.dtype)
