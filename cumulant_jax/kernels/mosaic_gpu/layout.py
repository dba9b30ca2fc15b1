"""What the kernels share: tiles, register layouts, shared memory and the stream of token tiles.

A tile is 64 tokens by 64 coordinates: the height of one wgmma and, in 16 bits, the 128 bytes of one
swizzled row. TMA loads tiles straight from [batch, tokens, heads, dim]. What a tile covers beyond
the array is filled with zeros on loading and dropped on storing, so no array is padded to tiles;
only its rows must be whole multiples of 16 bytes (see `token_tiles`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.block_sizes import tuned
from cumulant_jax.kernels.device import current_device

TILE = 64
# TMA wants strides in multiples of 16 bytes: 8 elements of 16 bits.
ALIGNMENT = 8
# Columns of the smallest wgmma, which sums a tile over its tokens.
SUM_COLUMNS = 8

MATRIX = plgpu.Layout.WGMMA
PER_ROW = MATRIX.reduce(1)
PER_COLUMN = MATRIX.reduce(0)

# exp to within 2 ulp of float32 is far below the rounding to 16 bits that follows.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True)


def round_up(size: int, multiple: int = TILE) -> int:
    """The least multiple that is not below `size`."""
    return math.ceil(size / multiple) * multiple


def pad_last(x: jax.Array, size: int, axes: int = 1) -> jax.Array:
    """Pads the last axes of a small array with zeros, to `size` or to a multiple of it.

    With `axes=1` the last axis becomes `size` long; with `axes=2` the last two axes grow to
    multiples of `size`.
    """
    if axes == 1:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    else:
        last = [(0, round_up(n, size) - n) for n in x.shape[-axes:]]
        widths = [(0, 0)] * (x.ndim - axes) + last
    return jnp.pad(x, widths) if any(high for _, high in widths) else x


def shared_memory(
    shape: Sequence[int], dtype, *, tiling: tuple[int, ...], swizzle: int
) -> pl.MemoryRef:
    """Shared memory whose last axes lie tile by tile, swizzled over `swizzle` bytes."""
    transforms = (
        plgpu.TilingTransform(tiling),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def operand(shape: Sequence[int], dtype) -> pl.MemoryRef:
    """Shared memory of 16-bit numbers that wgmma reads."""
    return shared_memory(shape, dtype, tiling=(8, TILE), swizzle=2 * TILE)


def total(terms: Iterable[jax.Array]) -> jax.Array:
    """Adds up arrays."""
    return functools.reduce(operator.add, terms)


def along_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per column to a matrix."""
    return lax.broadcast_in_dim(vector, shape, [1])


def along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per row to a matrix."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns_of(chunk: int) -> pl.Slice:
    """The columns of one 64-wide chunk."""
    return pl.ds(chunk * TILE, TILE)


def beyond(size: int, index: jax.Array) -> pl.Slice:
    """A slice from 0 that may reach beyond the end, as TMA allows and a static slice does not."""
    return pl.ds(index * 0, size)


def transposed(ref):
    """A matrix in shared memory, read across."""
    return ref.transpose((1, 0))


def token_sum(acc) -> jax.Array:
    """One number per row from an accumulator of identical columns (a product with ones)."""
    return jnp.sum(acc[...], axis=1) / SUM_COLUMNS


def ones_operand(dtype) -> jax.Array:
    """The right-hand side that sums over the tokens of a tile, stored across."""
    return jnp.ones((SUM_COLUMNS, TILE), dtype)


def valid_rows(start, length: int, mask: jax.Array | None) -> jax.Array:
    """Which of the rows `start…` of a tile hold a token: bool [64, 64]."""
    shape = (TILE, TILE)
    if mask is not None:
        return along_rows(mask, shape) > 0
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) < length - start


def mask_rows(mask: jax.Array | None, tokens: int) -> jax.Array | None:
    """A bool mask [batch, tokens, heads] as float32 [batch, heads, `tokens`] for TMA, padded."""
    if mask is None:
        return None
    return pad_last(jnp.swapaxes(mask, 1, 2).astype(jnp.float32), tokens)


def stream(
    steps: int, stages: int, load: Callable[..., None], compute: Callable[..., jax.Array], carry
) -> jax.Array:
    """Runs `carry = compute(step, slot, carry)` over tiles that `load(step, slot)` fetches ahead.

    `compute` waits for its tile, and returns only when nothing reads the slot any more.
    """
    for step in range(min(stages, steps)):
        load(np.int32(step), step)

    def body(step, carry):
        step = lax.convert_element_type(step, jnp.int32)  # int64 under enable_x64
        slot = lax.rem(step, np.int32(stages))
        carry = compute(step, slot, carry)

        @pl.when(step + stages < steps)
        def _():
            load(step + stages, slot)

        return carry

    return lax.fori_loop(0, steps, body, carry)


def split_tiles(
    tiles: int, independent: int, *, blocks: int, fewest: int, least: int = 1
) -> tuple[int, int]:
    """Splits a row of tiles over thread blocks.

    Args:
      tiles: tiles of tokens per head.
      independent: rows of tiles (batch times heads, and chunks of these).
      blocks: thread blocks that fill the chip; what was tuned for this one goes before it.
      fewest: tiles below which a thread block is not worth its start; likewise.
      least: tiles that a split has whatever was tuned, where the row has as many.

    Returns:
      The number of splits and the tiles of each.

    >>> split_tiles(1024, 1, blocks=396, fewest=4)
    (256, 4)
    >>> split_tiles(4, 3072, blocks=396, fewest=4)
    (1, 4)
    >>> split_tiles(64, 12, blocks=396, fewest=4, least=8)
    (8, 8)
    """
    sizes = tuned("mosaic_gpu", current_device().kind)
    blocks, fewest = sizes.get("blocks", blocks), sizes.get("fewest_tiles", fewest)
    fewest = max(fewest, least)
    splits = max(min(-(-blocks // independent), tiles // fewest), 1)
    steps = -(-tiles // splits)
    return -(-tiles // steps), steps
