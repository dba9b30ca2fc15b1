"""Position embeddings of a grid of patches, and the table of their names."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import weight_init


def sincos_2d(grid: tuple[int, int], dim: int, *, temperature: float = 10000.0) -> np.ndarray:
    """The fixed sine-cosine position embedding of a grid, as in MoCo v3 (arXiv 2104.02057) and MAE
    (arXiv 2111.06377).

    A patch in column x and row y gets [sin(x w), cos(x w), sin(y w), cos(y w)] with the dim / 4
    frequencies w_i = temperature ** (-i / (dim / 4)). big_vision divides i by dim / 4 - 1 instead:
    its table differs.

    Args:
      grid: (rows, columns) of patches.
      dim: features of a token, a multiple of 4.
      temperature: the longest wavelength is 2 pi times (almost) this many patches.

    Returns:
      float64 [rows * columns, dim], row by row.

    Raises:
      ValueError: dim is not a multiple of 4.

    >>> sincos_2d((2, 3), 8).shape
    (6, 8)
    >>> sincos_2d((2, 3), 8)[0]
    array([0., 0., 1., 1., 0., 0., 1., 1.])
    """
    if dim % 4:
        raise ValueError(f"dim is {dim}, and position='sincos2d' needs a multiple of 4")
    frequencies = temperature ** -(np.arange(dim // 4) / (dim // 4))
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    angles = [np.outer(coordinate, frequencies) for coordinate in (x, y)]
    return np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1)


class LearnedPositions(nnx.Module):
    """Adds a learned vector to every token, those before the patches (the class token) included."""

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        prefix_tokens: int,
        dim: int,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the table [1, prefix_tokens + rows * columns, dim] for one grid of patches."""
        shape = (1, prefix_tokens + grid[0] * grid[1], dim)
        self.position_embedding = nnx.Param(weight_init(rngs.params(), shape, param_dtype))
        self.grid = grid

    def __call__(self, tokens: Array, *, grid: tuple[int, int]) -> Array:
        """Adds the table to tokens [batch, prefix + rows * columns, dim]; `grid` must be the
        table's own.

        Raises:
          ValueError: the images have another number of patches than the table.
        """
        if grid != self.grid:
            raise ValueError(
                f"images have {grid[0]} x {grid[1]} patches and the learned position table has "
                f"{self.grid[0]} x {self.grid[1]}: create the model with the image_size of these "
                "images, or with position='sincos2d' or 'none', which take any size"
            )
        return tokens + self.position_embedding[...].astype(tokens.dtype)


class SinCosPositions(nnx.Module):
    """Adds the fixed table of `sincos_2d` to the patches, nothing to the class token."""

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        prefix_tokens: int,
        dim: int,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Keeps the number of prefix tokens; each call makes the table of its own grid."""
        del param_dtype, rngs
        sincos_2d(grid, dim)  # a wrong dim is reported now, not at the first call
        self.prefix_tokens = prefix_tokens

    def __call__(self, tokens: Array, *, grid: tuple[int, int]) -> Array:
        """Adds the table of this grid to tokens [batch, prefix + rows * columns, dim]."""
        table = np.pad(sincos_2d(grid, tokens.shape[-1]), ((self.prefix_tokens, 0), (0, 0)))
        return tokens + jnp.asarray(table, tokens.dtype)


class NoPositions(nnx.Module):
    """Adds nothing: the model then sees its patches as a set."""

    def __init__(self, **unused: object):
        """Takes the arguments of the other position embeddings and needs none."""

    def __call__(self, tokens: Array, *, grid: tuple[int, int]) -> Array:
        """Returns the tokens as they came."""
        return tokens


#: Name of a position embedding to its module.
POSITIONS: dict[str, type] = {
    "learned": LearnedPositions,
    "sincos2d": SinCosPositions,
    "none": NoPositions,
}
