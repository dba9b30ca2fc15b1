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
    align_dim,
    along_columns,
    along_rows,
    beyond,
    columns_of,
    ones_operand,
    operand,
    split_tiles,
    token_sum,
    transposed,
)
from cumulant_jax.kernels.mosaic_gpu.read_out import (
    compute_features,
    feature_operand,
    matrix_operand,
    multiply_features,
    row_product,
)

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
    stages = 2 if need_all else STAGES
    tiles = -(-length // TILE)
    groups, steps = split_tiles(tiles, batch * heads * dims, blocks=BLOCKS, fewest=FEWEST_TILES)
    heads_per_matrix = heads // matrix.blocks.shape[1]
    shape, out_shape = (TILE, TILE), (TILE, padded_columns)

    def body(*refs):
        query_ref, out_bar_ref, blocks_ref, scale_ref, ones_ref, *refs = refs
        normalizer_ref = refs.pop(0) if normalized else None
        query_bar_ref, blocks_bar_ref, last_bar_ref, *scratch = refs
        query_smem, out_bar_smem, blocks_smem, phi_smem, query_bar_smem, *scratch = scratch
        ones, normalizer_smem, row_smem, whole, barriers = scratch
        ready, normalized_tile, consumed, constants = barriers
        whole_phi, whole_query, whole_blocks = (*whole, query_smem, blocks_smem)[:3] if whole else (None,) * 3
        b, h, group, i = (lax.axis_index(n) for n in ("batch", "head", "group", "dim"))
        m = lax.div(h, np.int32(heads_per_matrix))
        first = group * (steps * TILE)
        here = pl.ds(i * TILE, TILE)
        scale = scale_ref[b, m]

        def load(step, slot):
            tokens = pl.ds(first + step * TILE, TILE)
            out_tile = out_bar_ref.at[b, tokens, h, beyond(padded_columns, b)]
            plgpu.copy_gmem_to_smem(out_tile, out_bar_smem.at[slot], ready.at[slot])
            query_tile = query_ref.at[b, tokens, h, here]
            plgpu.copy_gmem_to_smem(query_tile, query_smem.at[slot], ready.at[slot])
            if need_all:
                query_tile = query_ref.at[b, tokens, h, beyond(padded_dim, b)]
                plgpu.copy_gmem_to_smem(query_tile, whole_query.at[slot], ready.at[slot])

        def queries(slot):
            return plgpu.load(query_smem.at[slot], layout=MATRIX).astype(jnp.float32)

        def normalize(start, slot):
            """Turns the cotangent of the quotient into those of numerator and denominator."""
            normalizer = None
            for c in range(dims):
                x = plgpu.load(whole_query.at[slot, :, columns_of(c)], layout=MATRIX)
                phi = compute_features(parts, x.astype(jnp.float32), whole_phi, c, dtype)
                partial = row_product(phi, normalizer_smem, c)
                normalizer = partial if normalizer is None else normalizer + partial
            plgpu.commit_smem()

            def multiply(acc):
                multiply_features(acc, parts, whole_query.at[slot], whole_phi, whole_blocks)
                return acc[...]

            row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_ROW)
            inverse = jnp.where(row < length - start, 1 / (normalizer + normalizer_eps), 0.0)
            numerator = pl.run_scoped(multiply, plgpu.ACC(out_shape)) * scale
            bar = plgpu.load(out_bar_smem.at[slot], layout=MATRIX).astype(jnp.float32)
            bar = bar * along_rows(inverse, out_shape)
            # The scale of the matrix keeps the cotangent from vanishing in float16.
            out_bar_smem[slot] = (bar * scale).astype(dtype)
            row_smem[slot] = -jnp.sum(bar * numerator, axis=1) * inverse
            plgpu.commit_smem()

        def pull_back_queries():
            for p in range(count):
                plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p, here], blocks_smem.at[p], constants)
                if need_all:
                    plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p], whole_blocks.at[p], constants)
            if normalized:
                plgpu.copy_gmem_to_smem(normalizer_ref.at[b, m], normalizer_smem, constants)
            plgpu.copy_gmem_to_smem(ones_ref, ones, constants)
            for step in range(min(stages, steps)):
                load(np.int32(step), step)
            plgpu.barrier_wait(constants)

            def compute(step, carry):
                step = lax.convert_element_type(step, jnp.int32)
                slot = lax.rem(step, np.int32(stages))
                refill = step + (stages - 1)

                @pl.when((step > 0) & (refill < steps))
                def _():
                    free = lax.rem(refill, np.int32(stages))
                    plgpu.barrier_wait(consumed.at[free])
                    load(refill, free)

                plgpu.barrier_wait(ready.at[slot])
                start = first + step * TILE
                if normalized:
                    normalize(start, slot)
                    plgpu.barrier_arrive(normalized_tile.at[slot])
                query_bar = None
                for p, derivative in enumerate(parts.derivatives):

                    def multiply(acc, p=p):
                        plgpu.wgmma(acc, out_bar_smem.at[slot], transposed(blocks_smem.at[p]))
                        return acc[...]

                    # What follows a product is loaded after it, to save registers.
                    phi_bar = pl.run_scoped(multiply, plgpu.ACC(shape))
                    if normalized:
                        weight = plgpu.load(normalizer_smem.at[p, here], layout=PER_COLUMN)
                        row = plgpu.load(row_smem.at[slot], layout=PER_ROW)
                        phi_bar = phi_bar + along_rows(row, shape) * along_columns(weight, shape)
                    else:
                        phi_bar = phi_bar * scale
                    term = phi_bar * derivative(queries(slot))
                    query_bar = term if query_bar is None else query_bar + term
                plgpu.barrier_arrive(consumed.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                query_bar_smem[...] = query_bar.astype(dtype)
                plgpu.commit_smem()
                tokens = pl.ds(start, TILE)
                plgpu.copy_smem_to_gmem(query_bar_smem, query_bar_ref.at[b, tokens, h, here])
                return carry

            lax.fori_loop(0, steps, compute, None)

        def sum_over_tokens(*accumulators):
            blocks_bar, out_bar_sum = accumulators[:count], accumulators[count:]
            plgpu.barrier_wait(constants)

            def compute(step, carry):
                step = lax.convert_element_type(step, jnp.int32)
                slot = lax.rem(step, np.int32(stages))
                plgpu.barrier_wait(normalized_tile.at[slot] if normalized else ready.at[slot])
                phi = compute_features(parts, queries(slot), phi_smem, 0, dtype)
                if normalized:
                    row = along_rows(plgpu.load(row_smem.at[slot], layout=PER_ROW), shape)
                    carry = tuple(
                        bar + f.astype(jnp.float32) * row for f, bar in zip(phi, carry, strict=True)
                    )
                plgpu.commit_smem()
                for p in range(count):
                    rows = feature_operand(parts, query_smem.at[slot], phi_smem, p, 0)
                    plgpu.wgmma(blocks_bar[p], transposed(rows), out_bar_smem.at[slot])
                for acc in out_bar_sum:
                    plgpu.wgmma(acc, transposed(out_bar_smem.at[slot]), transposed(ones))
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

    stored = max(count - parts.first_is_identity, 1)
    whole = []
    if normalized:
        whole.append(operand((count, TILE, padded_dim), dtype))
    if need_all:
        whole.append(operand((stages, TILE, padded_dim), dtype))
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
            operand((stages, *shape), dtype),
            operand((stages, *out_shape), dtype),
            operand((count, *out_shape), dtype),
            operand((stored, *shape), dtype),
            operand(shape, dtype),
            operand((SUM_COLUMNS, TILE), dtype),
            plgpu.SMEM((count, padded_dim), jnp.float32),
            plgpu.SMEM((stages, TILE), jnp.float32),
            whole,
            (
                plgpu.Barrier(num_arrivals=2 + need_all, num_barriers=stages),
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
