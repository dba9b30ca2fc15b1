"""Images to tokens: a stack of strided convolutions."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.batch_norm import BatchNorm
from cumulant_jax.models.layers.initializers import conv_init
from cumulant_jax.models.layout import constrain


class ConvStem(nnx.Module):
    """The patch embedding of XCiT and ToST: 3x3 convolutions of stride 2, each with batch norm, and
    an exact GELU between them.

    log2(patch size) of them, the last with `dim` features and each one before with half as many:
    for a patch of 16 dim / 8, dim / 4, dim / 2, dim; for 8 dim / 4, dim / 2, dim. An odd side is
    rounded up at every step. In training the running statistics move, see `BatchNorm`.
    """

    def __init__(
        self,
        *,
        patch_size: int,
        channels: int,
        dim: int,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer.

        Args:
          patch_size: how much smaller the grid of tokens is than the image, a power of two.
          channels: channels of the images.
          dim: features of a token, a multiple of patch_size / 2.
          dtype: dtype of the computation and of the tokens.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        steps = patch_size.bit_length() - 1
        widths = [channels, *(dim >> step for step in reversed(range(steps)))]
        convolutions = [
            nnx.Conv(
                before,
                after,
                kernel_size=(3, 3),
                strides=(2, 2),
                # Not "SAME", which pads an even side behind only.
                padding=((1, 1), (1, 1)),
                use_bias=False,
                kernel_init=conv_init,
                rngs=rngs,
                **types,
            )
            for before, after in itertools.pairwise(widths)
        ]
        self.convolutions = nnx.List(convolutions)
        self.norms = nnx.List([BatchNorm(width, **types) for width in widths[1:]])

    @jax.named_scope("patch_embedding")
    def __call__(self, images: Array, *, train: bool = False) -> Array:
        """Embeds images [batch, height, width, channels].

        Returns:
          Tokens [batch, ceil(height / patch) * ceil(width / patch), dim], row by row.
        """
        x = images
        for index, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            x = x if index == 0 else jax.nn.gelu(x, approximate=False)
            # Rows stay whole: where XLA splits them and other devices hold copies, it adds up
            # the kernel's gradient over the copies too (jaxlib 0.11.2 and 0.12.0.1).
            x = constrain(convolution(x), "batch", None, None, None)
            x = norm(x, train=train)
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])
