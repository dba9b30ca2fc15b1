"""Video clips to tokens: one linear map of each tubelet."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import bias_init
from cumulant_jax.naming import unknown_name

_kernel_init = jax.nn.initializers.lecun_normal(in_axis=(0, 1, 2, 3), out_axis=4)


def _central(kernel: Array, frames: int) -> Array:
    return jnp.zeros((frames, *kernel.shape), kernel.dtype).at[frames // 2].set(kernel)


def _average(kernel: Array, frames: int) -> Array:
    return jnp.broadcast_to(kernel / frames, (frames, *kernel.shape))


#: Name of a way from a kernel for images to one for clips to its function.
INFLATIONS: dict[str, Callable[[Array, int], Array]] = {"central": _central, "average": _average}


def inflate_kernel(kernel: Array, frames: int, *, method: str = "central") -> Array:
    """Makes the kernel of a tubelet embedding from that of a patch embedding.

    Args:
      kernel: [patch height, patch width, channels, dim].
      frames: of a tubelet.
      method: "central": the central frame (number frames // 2, from 0) sees the kernel and the
        others nothing, so that a token starts as that of the central frame. "average": every frame
        sees the kernel divided by `frames` ("filter inflation"), so that a token starts as the mean
        over the frames.

    Returns:
      [frames, patch height, patch width, channels, dim].

    Raises:
      ValueError: an unknown method.

    Source:
      Arnab et al., "ViViT", arXiv 2103.15691, equations 8 (average) and 9 (central).

    >>> kernel = jnp.ones((16, 16, 3, 8))
    >>> inflate_kernel(kernel, 4, method="central")[:, 0, 0, 0, 0].tolist()
    [0.0, 0.0, 1.0, 0.0]
    >>> inflate_kernel(kernel, 4, method="average")[:, 0, 0, 0, 0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if method not in INFLATIONS:
        raise ValueError(unknown_name("method", method, INFLATIONS))
    return INFLATIONS[method](kernel, frames)


class TubeletEmbedding(nnx.Module):
    """Maps every tubelet of a clip, a patch over some frames, linearly to a token.

    This is the strided 3-D convolution of ViViT (arXiv 2103.15691, section 3.2), with its kernel
    [frames, patch height, patch width, channels, dim], computed as one matrix product: the tubelets
    do not overlap, so the two are the same sum.
    """

    def __init__(
        self,
        *,
        tubelet: tuple[int, int, int],
        channels: int,
        dim: int,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer.

        Args:
          tubelet: (frames, height, width) of a tubelet.
          channels: channels of the clips.
          dim: features of a token.
          dtype: dtype of the computation and of the tokens.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        shape = (*tubelet, channels, dim)
        self.kernel = nnx.Param(_kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (dim,), param_dtype))
        self.tubelet = tubelet
        self.dtype = dtype

    @jax.named_scope("tubelet_embedding")
    def __call__(self, clips: Array) -> Array:
        """Embeds a batch of clips.

        Args:
          clips: [batch, frames, height, width, channels]; frames, height and width are multiples of
            the tubelet's.

        Returns:
          Tokens [batch, tubelets, dim], frame by frame and in each row by row.
        """
        batch, *sizes, channels = clips.shape
        (frames, rows, columns), (depth, height, width) = self.tubelet, sizes
        grid = (depth // frames, height // rows, width // columns)
        tubelets = jnp.asarray(clips, self.dtype).reshape(
            batch, grid[0], frames, grid[1], rows, grid[2], columns, channels
        )
        pixels = frames * rows * columns * channels
        tubelets = tubelets.transpose(0, 1, 3, 5, 2, 4, 6, 7)
        tubelets = tubelets.reshape(batch, grid[0] * grid[1] * grid[2], pixels)
        kernel = self.kernel[...].astype(self.dtype).reshape(pixels, -1)
        return tubelets @ kernel + self.bias[...].astype(self.dtype)
