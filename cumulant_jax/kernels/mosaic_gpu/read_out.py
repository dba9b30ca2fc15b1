"""Reading moments out with the queries, and the pass back through it.

Forward, tokens are the rows of a wgmma: (features of the queries) (matrix). The matrix stays in
shared memory while tiles of queries stream past it. The constant row of the matrix, which holds the
mean of the values, is added in float32.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_gpu.feature_parts import FeatureParts, feature_parts
from cumulant_jax.kernels.mosaic_gpu.layout import (
    COMPILER_PARAMS,
    PER_COLUMN,
    TILE,
    along_columns,
    along_rows,
    columns_of,
    operand,
    pad_last,
    round_up,
    split_tiles,
    stream,
    total,
)
from cumulant_jax.kernels.mosaic_gpu.token_tiles import TokenTiles, align_dim, aligned_dim

BLOCKS = 396
FEWEST_TILES = 4
STAGES = 2


class MatrixOperand(NamedTuple):
    """A read-out matrix as the kernels take it.

    Attributes:
      blocks: [batch, heads, parts, padded dim, padded columns] in 16 bits, divided by `scale`.
      scale: float32 [batch, heads], powers of two that keep float16 from overflowing.
      constant: float32 [batch, heads, padded columns], the row of the constant feature or zeros.
      normalizer: float32 [batch, heads, parts, padded dim], the last column, or None.
    """

    blocks: jax.Array
    scale: jax.Array
    constant: jax.Array
    normalizer: jax.Array | None


def matrix_operand(
    parts: FeatureParts, matrix: jax.Array, dim: int, dtype, *, normalized: bool
) -> MatrixOperand:
    """Rounds a matrix [batch, heads, features, columns] to 16 bits and pads it to tiles."""
    batch, heads, _, columns = matrix.shape
    count = len(parts.values)
    blocks = matrix[:, :, : count * dim].reshape(batch, heads, count, dim, columns)
    normalizer = None
    if normalized:
        blocks, normalizer = blocks[..., :-1], pad_last(blocks[..., -1], round_up(dim))
        matrix = matrix[..., :-1]
    scale = jnp.ones((batch, heads), jnp.float32)
    if dtype == jnp.float16:
        largest = jnp.max(jnp.abs(blocks), axis=(2, 3, 4))
        scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(largest > 0, largest, 1))))
        blocks = blocks / scale[:, :, None, None, None]
    constant = matrix[:, :, -1] if parts.constant else jnp.zeros_like(matrix[:, :, 0])
    return MatrixOperand(
        pad_last(blocks.astype(dtype), TILE, axes=2),
        scale,
        pad_last(constant, round_up(constant.shape[-1])),
        normalizer,
    )


def read_out(
    features: Features, query: jax.Array, matrix: jax.Array, normalizer_eps: float | None = None
) -> jax.Array:
    """Reads moments out with the queries: features(query) @ matrix.

    Args:
      features: a feature map that `feature_parts` knows.
      query: [batch, tokens, heads, dim], bfloat16 or float16.
      matrix: float32 [batch, heads or fewer, features, columns]; query heads in equal groups share.
      normalizer_eps: if given, the last column is a normalizer: the others are divided by it plus
        this constant.

    Returns:
      [batch, tokens, heads, columns] (one column fewer with a normalizer) in the query's dtype.
    """
    parts = feature_parts(features)
    columns = matrix.shape[-1] - (normalizer_eps is not None)
    tiles = matrix_operand(
        parts, matrix, query.shape[-1], query.dtype, normalized=normalizer_eps is not None
    )
    out = _run_read_out(parts, align_dim(query), tiles, columns, normalizer_eps)
    return out[..., :columns]


@dataclasses.dataclass(frozen=True)
class QueryFeatures:
    """The features of tiles of queries, as operands.

    Attributes:
      parts: the feature map.
      tiles: the tiles of the queries.
    """

    parts: FeatureParts
    tiles: TokenTiles

    @property
    def present(self) -> int:
        """How many of the blocks (the first or none) lie in memory as TMA brought them."""
        return int(self.parts.first_is_identity and self.tiles.blocked)

    @property
    def scratch(self) -> pl.MemoryRef:
        """Shared memory for the blocks that must be computed."""
        stored = max(len(self.parts.values) - self.present, 1)
        return operand((stored, TILE, self.tiles.width), self.tiles.dtype)

    def read(self, tile, chunk: int) -> jax.Array:
        """One chunk of the queries in float32."""
        return self.tiles.read(tile, chunk).astype(jnp.float32)

    def compute(self, tile, chunk: int, phi_smem) -> list[jax.Array]:
        """Rounds the features of one chunk, writes the missing blocks and returns all."""
        x = self.read(tile, chunk)
        rounded = [function(x).astype(self.tiles.dtype) for function in self.parts.values]
        for p, phi in enumerate(rounded[self.present :]):
            phi_smem[p, :, columns_of(chunk)] = phi
        return rounded

    def operand(self, tile, phi_smem, part: int, chunk: int):
        """One block of one chunk, computed before."""
        if part < self.present:
            return tile.at[:, columns_of(chunk)]
        return phi_smem.at[part - self.present, :, columns_of(chunk)]

    def multiply(self, acc, tile, phi_smem, blocks) -> None:
        """Adds features @ matrix to an accumulator."""
        for c in range(self.tiles.chunks):
            for p in range(len(self.parts.values)):
                plgpu.wgmma(acc, self.operand(tile, phi_smem, p, c), blocks.at[p, columns_of(c)])


def row_product(phi: list[jax.Array], weights, chunk: int) -> jax.Array:
    """Multiplies the features of one chunk, row by row, with a vector: [64] in float32."""
    products = []
    for p, part in enumerate(phi):
        weight = plgpu.load(weights.at[p, columns_of(chunk)], layout=PER_COLUMN)
        product = part.astype(jnp.float32) * along_columns(weight, part.shape)
        products.append(jnp.sum(product, axis=1))
    return total(products)


def _run_read_out(parts, query, matrix, columns, normalizer_eps):
    batch, length, heads, _ = query.shape
    dtype = query.dtype
    count, padded_dim, padded_columns = matrix.blocks.shape[2:]
    dims = padded_dim // TILE
    # The matrix and the accumulators of one thread block: 128 columns, or 64 of a tall matrix.
    wide = padded_columns % (2 * TILE) == 0 and count * padded_dim <= 4 * TILE
    chunk = 2 * TILE if wide else TILE
    chunks = padded_columns // chunk
    tiles = -(-length // TILE)
    groups, steps = split_tiles(tiles, batch * heads * chunks, blocks=BLOCKS, fewest=FEWEST_TILES)
    heads_per_matrix = heads // matrix.blocks.shape[1]
    shape = (TILE, chunk)
    out_type = jax.ShapeDtypeStruct((batch, length, heads, aligned_dim(columns)), dtype)
    query_tiles, out_tiles = TokenTiles.of(query), TokenTiles.of(out_type, chunk)
    query_features = QueryFeatures(parts, query_tiles)

    def body(*refs):
        query_ref, blocks_ref, scale_ref, constant_ref, *refs = refs
        normalizer_ref = refs.pop(0) if normalizer_eps is not None else None
        out_ref, *scratch = refs
        query_smem, blocks_smem, constant_smem, normalizer_smem, phi_smem, out_smem, *bars = scratch
        ready, constants = bars
        b, h, group, j = (lax.axis_index(n) for n in ("batch", "head", "group", "column"))
        m = lax.div(h, np.int32(heads_per_matrix))
        first = group * (steps * TILE)
        here = pl.ds(j * chunk, chunk)

        def load(step, slot):
            tokens = pl.ds(first + step * TILE, TILE)
            index = (b, tokens, h)
            query_tiles.load(query_ref, index, b * 0, query_smem.at[slot], ready.at[slot])

        for p in range(count):
            plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p, :, here], blocks_smem.at[p], constants)
        plgpu.copy_gmem_to_smem(constant_ref.at[b, m, here], constant_smem, constants)
        if normalizer_ref is not None:
            plgpu.copy_gmem_to_smem(normalizer_ref.at[b, m], normalizer_smem, constants)
        scale = scale_ref[b, m]
        plgpu.barrier_wait(constants)
        constant = along_columns(plgpu.load(constant_smem, layout=PER_COLUMN), shape)

        def compute(step, slot, carry):
            plgpu.barrier_wait(ready.at[slot])
            normalizers = []
            for c in range(dims):
                phi = query_features.compute(query_smem.at[slot], c, phi_smem)
                if normalizer_ref is not None:
                    normalizers.append(row_product(phi, normalizer_smem, c))
            plgpu.commit_smem()

            def multiply(acc):
                query_features.multiply(acc, query_smem.at[slot], phi_smem, blocks_smem)
                return acc[...]

            out = pl.run_scoped(multiply, plgpu.ACC(shape)) * scale + constant
            if normalizers:
                out = out * along_rows(1 / (total(normalizers) + normalizer_eps), shape)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_tiles.write_whole(out_smem.at[0], out.astype(dtype))
            plgpu.commit_smem()
            tokens = pl.ds(first + step * TILE, TILE)
            out_tiles.store(out_ref, (b, tokens, h), j * chunk, out_smem.at[0])
            return carry

        stream(steps, STAGES, load, compute, None)
        plgpu.wait_smem_to_gmem(0)

    arguments = [query, matrix.blocks, matrix.scale, matrix.constant]
    if normalizer_eps is not None:
        arguments.append(matrix.normalizer)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            query_tiles.slots(STAGES),
            operand((count, padded_dim, chunk), dtype),
            plgpu.SMEM((chunk,), jnp.float32),
            plgpu.SMEM((count, padded_dim), jnp.float32),
            query_features.scratch,
            out_tiles.slots(1),
            plgpu.Barrier(num_arrivals=query_tiles.copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=count + 1 + (normalizer_eps is not None)),
        ],
        grid=(batch, heads, groups, chunks),
        grid_names=("batch", "head", "group", "column"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="read_out",
    )(*arguments)
