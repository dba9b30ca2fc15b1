"""Position embeddings of a grid of patches, the table of their names, and their resizing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import conv_init, weight_init

#: Half of the channels of the Fourier code: a sine or cosine of the row, or of the column, each.
_FOURIER_HIDDEN = 32


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


def fourier_2d(
    grid: tuple[int, int], *, hidden: int = _FOURIER_HIDDEN, temperature: float = 10000.0
) -> np.ndarray:
    """The fixed code of ToST and XCiT (arXiv 2106.09681), from DETR (arXiv 2005.12872).

    Row r (from 0) of H and column c of W are angles 2 pi (r + 1) / (H + 1e-6) and
    2 pi (c + 1) / (W + 1e-6), so that every grid spans the same range. Channel j of a row is the
    sine (j even) or cosine (j odd) of its angle / temperature ** (2 floor(j / 2) / hidden), and
    likewise of a column.

    Args:
      grid: (rows, columns) of patches.
      hidden: channels for the row, and as many for the column.
      temperature: of the frequencies.

    Returns:
      float32 [rows * columns, 2 * hidden], row by row, first the channels of the row. The angles
      are rounded to float32 at each step, as in the published code: models trained with it have
      seen them so. It is within 1e-7 of what that gives.

    >>> fourier_2d((14, 14)).shape
    (196, 64)
    """
    channels = np.arange(hidden)
    wavelengths = np.float32(temperature ** (2 * (channels // 2) / hidden))
    parts = []
    for count in grid:
        positions = np.arange(1, count + 1, dtype=np.float32)
        angles = positions / np.float32(count + np.float32(1e-6)) * np.float32(2 * np.pi)
        angles = np.float64(angles[:, None] / wavelengths)
        parts.append(np.float32(np.where(channels % 2 == 0, np.sin(angles), np.cos(angles))))
    rows, columns = parts
    shape = (*grid, hidden)
    table = np.concatenate(
        [np.broadcast_to(rows[:, None], shape), np.broadcast_to(columns, shape)], axis=-1
    )
    return table.reshape(grid[0] * grid[1], 2 * hidden)


def resize_positions(
    table: Array,
    *,
    old_grid: tuple[int, ...],
    new_grid: tuple[int, ...],
    prefix_tokens: int = 0,
) -> Array:
    """Brings a learned position table from one grid of patches to another.

    Bicubic, with antialiasing where the grid shrinks, as timm does it; along every axis of the
    grid, so that (frames, rows, columns) of a video are resized too. The rows of tokens before the
    patches stay as they are.

    Args:
      table: [1, prefix_tokens + patches, dim], patches in row-major order of `old_grid`.
      old_grid: patches along each axis of the table.
      new_grid: patches along each axis of the result.
      prefix_tokens: tokens before the patches, such as a class token.

    Returns:
      [1, prefix_tokens + new patches, dim] in the table's dtype, computed in float32 at least; the
      table itself when the grids are the same.

    Raises:
      ValueError: the table does not have the patches of `old_grid`, or the grids do not fit each
        other.

    >>> table = jnp.zeros((1, 1 + 14 * 14, 64))
    >>> resize_positions(table, old_grid=(14, 14), new_grid=(16, 24), prefix_tokens=1).shape
    (1, 385, 64)
    """
    if len(old_grid) != len(new_grid) or min(new_grid) < 1:
        raise ValueError(
            f"new_grid must have as many axes as old_grid, {old_grid}, each of at least one patch; "
            f"got {new_grid}"
        )
    tokens = prefix_tokens + math.prod(old_grid)
    if table.ndim != 3 or table.shape[:2] != (1, tokens):
        raise ValueError(
            f"table must be [1, {tokens}, dim] for old_grid {old_grid} and {prefix_tokens} prefix "
            f"tokens, got shape {table.shape}"
        )
    if tuple(old_grid) == tuple(new_grid):
        return table
    dim = table.shape[-1]
    prefix, patches = table[:, :prefix_tokens], table[0, prefix_tokens:]
    patches = patches.astype(jnp.promote_types(table.dtype, jnp.float32))
    patches = jax.image.resize(
        patches.reshape(*old_grid, dim), (*new_grid, dim), method="cubic", antialias=True
    )
    patches = patches.reshape(1, math.prod(new_grid), dim).astype(table.dtype)
    return jnp.concatenate([prefix, patches], axis=1)


class LearnedPositions(nnx.Module):
    """Adds a learned vector to every token, those before the patches (the class token) included.

    For another grid of patches resize the table: `cumulant_jax.models.resize` does it for a model.
    """

    def __init__(
        self,
        *,
        grid: tuple[int, ...],
        prefix_tokens: int,
        dim: int,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the table [1, prefix_tokens + patches, dim] for one grid of patches, which may
        have any number of axes: (rows, columns), or (frames, rows, columns).
        """
        shape = (1, prefix_tokens + math.prod(grid), dim)
        self.position_embedding = nnx.Param(weight_init(rngs.params(), shape, param_dtype))
        self.grid = grid

    @jax.named_scope("positions")
    def __call__(self, tokens: Array, *, grid: tuple[int, ...]) -> Array:
        """Adds the table to tokens [batch, prefix + patches, dim]; `grid` must be the table's own.

        Raises:
          ValueError: the images have another number of patches than the table.
        """
        self.check_grid(grid)
        return tokens + self.position_embedding[...].astype(tokens.dtype)

    def check_grid(self, grid: tuple[int, ...]) -> None:
        """Raises ValueError unless the grid is the table's own."""
        if grid != self.grid:
            came, own = (" x ".join(map(str, sides)) for sides in (grid, self.grid))
            raise ValueError(
                f"images have {came} patches and the learned position table has {own}: create the "
                "model with the image_size of these images, resize a trained one with "
                "cumulant_jax.models.resize, or use position='sincos2d' or 'none', which take any "
                "size"
            )


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

    @jax.named_scope("positions")
    def __call__(self, tokens: Array, *, grid: tuple[int, int]) -> Array:
        """Adds the table of this grid to tokens [batch, prefix + rows * columns, dim]."""
        table = np.pad(sincos_2d(grid, tokens.shape[-1]), ((self.prefix_tokens, 0), (0, 0)))
        return tokens + jnp.asarray(table, tokens.dtype)


class FourierPositions(nnx.Module):
    """Adds a learned linear map of `fourier_2d` to the patches, nothing to the class token."""

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        prefix_tokens: int,
        dim: int,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the map; each call makes the table of its own grid."""
        del grid
        # Both start as in PyTorch: uniform within 1 / sqrt(fan-in) of zero.
        bound = (2 * _FOURIER_HIDDEN) ** -0.5
        self.projection = nnx.Linear(
            2 * _FOURIER_HIDDEN,
            dim,
            # As published in every mode, which costs nothing: it does not depend on the batch.
            dtype=jnp.promote_types(param_dtype, jnp.float32),
            param_dtype=param_dtype,
            kernel_init=conv_init,
            bias_init=lambda key, shape, dtype: jax.random.uniform(
                key, shape, dtype, minval=-bound, maxval=bound
            ),
            rngs=rngs,
        )
        self.prefix_tokens = prefix_tokens

    @jax.named_scope("positions")
    def __call__(self, tokens: Array, *, grid: tuple[int, int]) -> Array:
        """Adds the code of this grid to tokens [batch, prefix + rows * columns, dim]."""
        code = jnp.pad(
            self.projection(jnp.asarray(fourier_2d(grid))), ((self.prefix_tokens, 0), (0, 0))
        )
        return tokens + code.astype(tokens.dtype)


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
    "fourier": FourierPositions,
    "none": NoPositions,
}
