"""The pass back through the read-out: gradients of queries and matrix in one read of both inputs.

The gradient of the matrix is a sum over tokens, (features of the queries)ᵀ (cotangent), and that of
the queries a product with the matrix, (cotangent)(matrix)ᵀ · features′(queries). Both take the
cotangent as TMA brought it, once as the right and once as the left operand: one warpgroup does the
queries and one the matrix, so that neither runs out of registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_gpu.feature_parts import feature_parts
from cumulant_jax.kernels.mosaic_gpu.layout import (
    COMPILER_PARAMS,
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    SUM_COLUMNS,
    TILE,
    along_columns,
    along_rows,
    columns_of,
    ones_operand,
    operand,
    split_tiles,
    token_sum,
    total,
    transposed,
)
from cumulant_jax.kernels.mosaic_gpu.read_out import (
    QueryFeatures,
    matrix_operand,
    row_product,
)
from cumulant_jax.kernels.mosaic_gpu.token_tiles import TokenTiles, align_dim

BLOCKS = 396
FEWEST_TILES = 4
STAGES = 3


def read_out_backward(
    features: Features,
    query: jax.Array,
    matrix: jax.Array,
    normalizer_eps: float | None,
    out_bar: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Pulls a cotangent of the read-out back to the queries and the matrix.

    Args:
      features: a feature map that `feature_parts` knows.
      query: [batch, tokens, heads, dim], bfloat16 or float16.
      matrix: float32 [batch, heads or fewer, features, columns].
      normalizer_eps: as in `read_out`.
      out_bar: [batch, tokens, heads, columns] (one fewer with a normalizer) in the query's dtype.

    Returns:
      The cotangent of the query, in its shape and dtype, and float32 [batch, heads, features,
      columns], the cotangent of the matrix for every query head.
    """
    parts = feature_parts(features)
    batch, _, heads, dim = query.shape
    normalized = normalizer_eps is not None
    columns = matrix.shape[-1] - normalized
    tiles = matrix_operand(parts, matrix, dim, query.dtype, normalized=normalized)
    query_bar, blocks_bar, last_bar = _run_backward(
        parts, align_dim(query), tiles, normalizer_eps, align_dim(out_bar)
    )
    blocks_bar = blocks_bar.sum(0)[..., :dim, :columns]
    matrix_bar = blocks_bar.reshape(batch, heads, -1, columns)
    if normalized:
        normalizer_bar = last_bar.sum(0)[..., :dim].reshape(batch, heads, -1, 1)
        matrix_bar = jnp.concatenate([matrix_bar, normalizer_bar], axis=-1)
    if parts.constant:
        constant_bar = last_bar.sum(0)[..., :1, :columns]
        matrix_bar = jnp.concatenate([matrix_bar, constant_bar], axis=-2)
    return query_bar[..., :dim], matrix_bar


def _run_backward(parts, query, matrix, normalizer_eps, out_bar):
    batch, length, heads, _ = query.shape
    dtype = query.dtype
    normalized = normalizer_eps is not None
    count, padded_dim, padded_columns = matrix.blocks.shape[2:]
    dims = padded_dim // TILE
    # A thread block pulls back to 64 coordinates of the queries; their normalizer needs all.
    need_all = normalized and dims > 1
    query_tiles, whole_tiles, out_tiles = (
        TokenTiles.of(query, TILE), TokenTiles.of(query), TokenTiles.of(out_bar)
    )  # fmt: skip
    query_features = QueryFeatures(parts, query_tiles)
    whole_features = QueryFeatures(parts, whole_tiles)
    arrivals = query_tiles.copies + out_tiles.copies + need_all * whole_tiles.copies
    # Whether the first warpgroup rewrites the cotangent before the second may read it.
    prepared = normalized or not out_tiles.blocked
    stages = 2 if need_all or not out_tiles.blocked else STAGES
    tiles = -(-length // TILE)
    groups, steps = split_tiles(tiles, batch * heads * dims, blocks=BLOCKS, fewest=FEWEST_TILES)
    heads_per_matrix = heads // matrix.blocks.shape[1]
    shape, out_shape = (TILE, TILE), (TILE, padded_columns)

    def body(*refs):
        query_ref, out_bar_ref, blocks_ref, scale_ref, ones_ref, *refs = refs
        normalizer_ref = refs.pop(0) if normalized else None
        query_bar_ref, blocks_bar_ref, last_bar_ref, *scratch = refs
        query_smem, out_bar_smem, blocks_smem, phi_smem, query_bar_smem, *scratch = scratch
        ones, normalizer_smem, row_smem, rewritten, whole, barriers = scratch
        ready, prepared_tile, consumed, constants = barriers
        cotangent = rewritten[0] if rewritten else out_bar_smem
        # What the normalizer needs: features of its own, and with more than 64 dims all of them.
        whole_phi, whole_query, whole_blocks = (None, query_smem, blocks_smem)
        if need_all:
            whole_phi, whole_query, whole_blocks = whole
        elif normalized:
            (whole_phi,) = whole
        b, h, group, i = (lax.axis_index(n) for n in ("batch", "head", "group", "dim"))
        m = lax.div(h, np.int32(heads_per_matrix))
        first = group * (steps * TILE)
        here = pl.ds(i * TILE, TILE)
        scale = scale_ref[b, m]

        def load(step, slot):
            index = (b, pl.ds(first + step * TILE, TILE), h)
            out_tiles.load(out_bar_ref, index, b * 0, out_bar_smem.at[slot], ready.at[slot])
            query_tiles.load(query_ref, index, i * TILE, query_smem.at[slot], ready.at[slot])
            if need_all:
                whole_tiles.load(query_ref, index, b * 0, whole_query.at[slot], ready.at[slot])

        def normalize(start, slot):
            """Turns the cotangent of the quotient into those of numerator and denominator."""
            normalizers = []
            for c in range(dims):
                phi = whole_features.compute(whole_query.at[slot], c, whole_phi)
                normalizers.append(row_product(phi, normalizer_smem, c))
            plgpu.commit_smem()

            def multiply(acc):
                whole_features.multiply(acc, whole_query.at[slot], whole_phi, whole_blocks)
                return acc[...]

            row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_ROW)
            inverse = jnp.where(
                row < length - start, 1 / (total(normalizers) + normalizer_eps), 0.0
            )
            numerator = pl.run_scoped(multiply, plgpu.ACC(out_shape)) * scale
            products = []
            for c in range(out_tiles.chunks):
                bar = out_tiles.read(out_bar_smem.at[slot], c).astype(jnp.float32)
                bar = bar * along_rows(inverse, bar.shape)
                # The scale of the matrix keeps the cotangent from vanishing in float16.
                cotangent.at[slot][:, columns_of(c)] = (bar * scale).astype(dtype)
                products.append(jnp.sum(bar * numerator[:, c * TILE : (c + 1) * TILE], axis=1))
            row_smem[slot] = -total(products) * inverse

        def pull_back_queries():
            for p in range(count):
                plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p, here], blocks_smem.at[p], constants)
                if need_all:
                    plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p], whole_blocks.at[p], constants)
            if normalizer_ref is not None:
                plgpu.copy_gmem_to_smem(normalizer_ref.at[b, m], normalizer_smem, constants)
            plgpu.copy_gmem_to_smem(ones_ref, ones, constants)
            for step in range(min(stages, steps)):
                load(np.int32(step), step)
            plgpu.barrier_wait(constants)

            def compute(step, carry):
                step = lax.convert_element_type(step, jnp.int32)
                slot = lax.rem(step, np.int32(stages))
                free = lax.rem(step + (stages - 1), np.int32(stages))

                # The tile before this one is done with once both warpgroups are.
                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(consumed.at[free])

                    @pl.when(step + (stages - 1) < steps)
                    def _():
                        load(step + (stages - 1), free)

                plgpu.barrier_wait(ready.at[slot])
                start = first + step * TILE
                if normalized:
                    normalize(start, slot)
                else:
                    out_tiles.prepare(out_bar_smem.at[slot], cotangent.at[slot])
                if prepared:
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(prepared_tile.at[slot])
                terms = []
                for p, derivative in enumerate(parts.derivatives):

                    def multiply(acc, p=p):
                        plgpu.wgmma(acc, cotangent.at[slot], transposed(blocks_smem.at[p]))
                        return acc[...]

                    # What follows a product is loaded after it, to save registers.
                    phi_bar = pl.run_scoped(multiply, plgpu.ACC(shape))
                    if normalized:
                        weight = plgpu.load(normalizer_smem.at[p, here], layout=PER_COLUMN)
                        row = plgpu.load(row_smem.at[slot], layout=PER_ROW)
                        phi_bar = phi_bar + along_rows(row, shape) * along_columns(weight, shape)
                    else:
                        phi_bar = phi_bar * scale
                    term = phi_bar * derivative(query_features.read(query_smem.at[slot], 0))
                    terms.append(term)
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                query_tiles.write(query_bar_smem.at[0], 0, total(terms).astype(dtype))
                plgpu.commit_smem()
                index = (b, pl.ds(start, TILE), h)
                query_tiles.store(query_bar_ref, index, i * TILE, query_bar_smem.at[0])
                return carry

            lax.fori_loop(0, steps, compute, None)
            plgpu.barrier_wait(consumed.at[(steps - 1) % stages])

        def sum_over_tokens(*accumulators):
            blocks_bar, out_bar_sum = accumulators[:count], accumulators[count:]
            plgpu.barrier_wait(constants)

            def compute(step, carry):
                step = lax.convert_element_type(step, jnp.int32)
                slot = lax.rem(step, np.int32(stages))
                plgpu.barrier_wait((prepared_tile if prepared else ready).at[slot])
                phi = query_features.compute(query_smem.at[slot], 0, phi_smem)
                if normalized:
                    row = along_rows(plgpu.load(row_smem.at[slot], layout=PER_ROW), shape)
                    carry = tuple(
                        bar + f.astype(jnp.float32) * row for f, bar in zip(phi, carry, strict=True)
                    )
                plgpu.commit_smem()
                for p in range(count):
                    rows = query_features.operand(query_smem.at[slot], phi_smem, p, 0)
                    plgpu.wgmma(blocks_bar[p], transposed(rows), cotangent.at[slot])
                for acc in out_bar_sum:
                    plgpu.wgmma(acc, transposed(cotangent.at[slot]), transposed(ones))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(consumed.at[slot])
                return carry

            zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)
            carry = lax.fori_loop(0, steps, compute, (zeros,) * (count * normalized))

            for p in range(count):
                bar = blocks_bar[p][...] / scale if normalized else blocks_bar[p][...]
                blocks_bar_ref[group, b, h, p, here, :] = bar
            for p, bar in enumerate(carry):
                last_bar_ref[group, b, h, p, here] = jnp.sum(bar, axis=0)

            @pl.when(i == 0)
            def _():
                for acc in out_bar_sum:
                    last_bar_ref[group, b, h, 0, :] = token_sum(acc)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            pull_back_queries()

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            pl.run_scoped(
                sum_over_tokens,
                *(plgpu.ACC(out_shape) for _ in range(count)),
                *(plgpu.ACC((padded_columns, SUM_COLUMNS)) for _ in range(parts.constant)),
            )

        plgpu.wait_smem_to_gmem(0)

    whole = [whole_features.scratch] if normalized else []
    if need_all:
        whole.append(whole_tiles.slots(stages))
        whole.append(operand((count, padded_dim, padded_columns), dtype))
    last_shape = (count, padded_dim) if normalized else (1, padded_columns)
    arguments = [query, out_bar, matrix.blocks, matrix.scale, ones_operand(dtype)]
    if normalized:
        arguments.append(matrix.normalizer)
    per_head = (groups, batch, heads)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct((*per_head, count, padded_dim, padded_columns), jnp.float32),
            jax.ShapeDtypeStruct((*per_head, *last_shape), jnp.float32),
        ],
        scratch_types=[
            query_tiles.slots(stages),
            out_tiles.slots(stages),
            operand((count, *out_shape), dtype),
            query_features.scratch,
            query_tiles.slots(1),
            operand((SUM_COLUMNS, TILE), dtype),
            plgpu.SMEM((count, padded_dim), jnp.float32),
            plgpu.SMEM((stages, TILE), jnp.float32),
            out_tiles.rewritten(stages),
            whole,
            (
                plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=1 + count * (1 + need_all) + normalized),
            ),
        ],
        grid=(batch, heads, groups, dims),
        grid_names=("batch", "head", "group", "dim"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="read_out_backward",
    )(*arguments)
