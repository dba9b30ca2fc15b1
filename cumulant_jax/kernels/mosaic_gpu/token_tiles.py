"""Tiles of tokens between global memory and the tensor core.

A tile that wgmma is to read lies in blocks of 8 tokens by 64 coordinates, swizzled. TMA brings it
so only from arrays whose tokens come in multiples of 8 and whose dim is up to 64 or a multiple of
it. For other lengths (the 197 tokens of a vision transformer) and dims (96) tiles come row by
row, and what is to be an operand is rewritten from registers. (For dims up to 64 the two layouts
are the same bytes, but the compiler has no way to say so.)
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.mosaic_gpu.layout import (
    ALIGNMENT,
    MATRIX,
    TILE,
    along_rows,
    columns_of,
    operand,
    pad_last,
    round_up,
    shared_memory,
)


def aligned_dim(dim: int) -> int:
    """The least dim that the kernels can bring: a multiple of 8, above 64 of 32."""
    return round_up(dim, ALIGNMENT if dim <= TILE else TILE // 2)


def align_dim(x: jax.Array) -> jax.Array:
    """Pads the dim of tokens to `aligned_dim`; a copy of the array where it is not that already."""
    return pad_last(x, aligned_dim(x.shape[-1]))


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """How tiles of one array [batch, tokens, heads, dim] are brought in or out.

    Attributes:
      width: columns per tile, a multiple of 64.
      dtype: element type, of 16 bits.
      blocked: whether tiles lie as wgmma reads them; otherwise in chunks of 64 columns.
      unit: columns that are swizzled together where tiles are not blocked.
    """

    width: int
    dtype: jnp.dtype
    blocked: bool
    unit: int

    @classmethod
    def of(cls, x: jax.Array | jax.ShapeDtypeStruct, width: int | None = None) -> TokenTiles:
        """The tiles of an array, `width` columns (by default all) at a time."""
        length, dim = x.shape[1], x.shape[3]
        unit = TILE if dim <= TILE else math.gcd(dim, TILE)
        blocked = length % 8 == 0 and unit == TILE
        return cls(width or round_up(dim), x.dtype, blocked, unit)

    @property
    def chunks(self) -> int:
        """The number of 64-wide chunks of a tile."""
        return self.width // TILE

    @property
    def copies(self) -> int:
        """The number of TMA copies per tile."""
        return 1 if self.blocked else self.chunks

    def slots(self, stages: int) -> pl.MemoryRef:
        """Shared memory for `stages` tiles."""
        if self.blocked:
            return operand((stages, TILE, self.width), self.dtype)
        shape = (stages, self.chunks, TILE, TILE)
        return shared_memory(shape, self.dtype, tiling=(self.unit,), swizzle=2 * self.unit)

    def rewritten(self, stages: int = 1) -> list[pl.MemoryRef]:
        """Shared memory for tiles rewritten as operands; nothing where they lie as such."""
        return [] if self.blocked else [operand((stages, TILE, self.width), self.dtype)]

    def load(self, ref, index, start, slot, barrier) -> None:
        """Starts to bring in the tile at `index` = (batch, tokens, head), columns from `start`."""
        for source, target in self._copies(ref, index, start, slot):
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def store(self, ref, index, start, slot) -> None:
        """Starts to bring out a tile; what lies beyond the array is dropped."""
        for target, source in self._copies(ref, index, start, slot):
            plgpu.copy_smem_to_gmem(source, target)

    def _copies(self, ref, index, start, slot):
        if self.blocked:
            return [(ref.at[*index, pl.ds(start, self.width)], slot)]
        return [
            (ref.at[*index, pl.ds(start + c * TILE, TILE)], slot.at[c]) for c in range(self.chunks)
        ]

    def read(self, slot, chunk: int) -> jax.Array:
        """Columns of one chunk, in registers, in their own dtype."""
        if self.blocked:
            return plgpu.load(slot.at[:, columns_of(chunk)], layout=MATRIX)
        return plgpu.load(slot.at[chunk], layout=MATRIX)

    def write(self, slot, chunk: int, x: jax.Array) -> None:
        """Writes one chunk of a tile that is to be stored."""
        if self.blocked:
            slot[:, columns_of(chunk)] = x
        else:
            slot[chunk] = x

    def write_whole(self, slot, x: jax.Array) -> None:
        """Writes all chunks of a tile that is to be stored."""
        for c in range(self.chunks):
            self.write(slot, c, x[:, c * TILE : (c + 1) * TILE])

    def prepare(self, slot, rewritten, mask: jax.Array | None = None):
        """Makes a tile an operand, with zeros where masked; the caller commits what is written."""
        target = slot if self.blocked else rewritten
        if self.blocked and mask is None:
            return target
        for c in range(self.chunks):
            x = self.read(slot, c)
            if mask is not None:
                x = jnp.where(along_rows(mask, x.shape) > 0, x, jnp.zeros_like(x))
            target[:, columns_of(c)] = x
        return target
