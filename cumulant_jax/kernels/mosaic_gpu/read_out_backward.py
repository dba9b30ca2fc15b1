"""The pass back through the read-out: gradients of queries and matrix in one read of both inputs.

The gradient of the matrix is a sum over tokens, (features of the queries)ᵀ (cotangent), and that of
the queries a product with the matrix, (cotangent)(matrix)ᵀ · features′(queries). Both take the
cotangent as TMA brought it, once as the right and once as the left operand.
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
    stream,
    token_sum,
    transposed,
)
from cumulant_jax.kernels.mosaic_gpu.read_out import (
    compute_features,
    feature_operand,
    matrix_operand,
)

BLOCKS = 396
FEWEST_TILES = 4
STAGES = 2


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
    tiles = -(-length // TILE)
    groups, steps = split_tiles(tiles, batch * heads * dims, blocks=BLOCKS, fewest=FEWEST_TILES)
    heads_per_matrix = heads // matrix.blocks.shape[1]
    shape, out_shape = (TILE, TILE), (TILE, padded_columns)
    last_shape = (count, padded_dim) if normalized else (1, padded_columns)

    def body(*refs):
        query_ref, out_bar_ref, blocks_ref, scale_ref, ones_ref, *refs = refs
        normalizer_ref = refs.pop(0) if normalized else None
        query_bar_ref, blocks_bar_ref, last_bar_ref = refs
        b, h, group, i = (lax.axis_index(n) for n in ("batch", "head", "group", "dim"))
        m = lax.div(h, np.int32(heads_per_matrix))
        first = group * (steps * TILE)
        here = pl.ds(i * TILE, TILE)
        scale = scale_ref[b, m]

        def pipeline(
            query_smem, out_bar_smem, blocks_smem, phi_smem, query_bar_smem, ones, normalizer_smem,
            whole, ready, constants,
        ):  # fmt: skip
            whole_query, whole_blocks, whole_phi = whole or (query_smem, blocks_smem, phi_smem)

            def load(step, slot):
                tokens = pl.ds(first + step * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    query_ref.at[b, tokens, h, here], query_smem.at[slot], ready.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    out_bar_ref.at[b, tokens, h, beyond(padded_columns, b)],
                    out_bar_smem.at[slot],
                    ready.at[slot],
                )
                if need_all:
                    plgpu.copy_gmem_to_smem(
                        query_ref.at[b, tokens, h, beyond(padded_dim, b)],
                        whole_query.at[slot],
                        ready.at[slot],
                    )

            for p in range(count):
                plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p, here], blocks_smem.at[p], constants)
                if need_all:
                    plgpu.copy_gmem_to_smem(blocks_ref.at[b, m, p], whole_blocks.at[p], constants)
            if normalized:
                plgpu.copy_gmem_to_smem(normalizer_ref.at[b, m], normalizer_smem, constants)
            plgpu.copy_gmem_to_smem(ones_ref, ones, constants)
            plgpu.barrier_wait(constants)

            def normalize(start, slot):
                """Turns the cotangent of the quotient into those of numerator and denominator."""
                normalizer = None
                for c in range(dims):
                    x = plgpu.load(whole_query.at[slot, :, columns_of(c)], layout=MATRIX)
                    phi = compute_features(parts, x.astype(jnp.float32), whole_phi, c, dtype)
                    for p in range(count):
                        weight = plgpu.load(normalizer_smem.at[p, columns_of(c)], layout=PER_COLUMN)
                        product = phi[p].astype(jnp.float32) * along_columns(weight, shape)
                        partial = jnp.sum(product, axis=1)
                        normalizer = partial if normalizer is None else normalizer + partial
                plgpu.commit_smem()

                def multiply(acc):
                    for c in range(dims):
                        for p in range(count):
                            plgpu.wgmma(
                                acc,
                                feature_operand(parts, whole_query.at[slot], whole_phi, p, c),
                                whole_blocks.at[p, columns_of(c)],
                            )
                    return acc[...]

                row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=PER_ROW)
                inverse = jnp.where(row < length - start, 1 / (normalizer + normalizer_eps), 0.0)
                numerator = pl.run_scoped(multiply, plgpu.ACC(out_shape)) * scale
                bar = plgpu.load(out_bar_smem.at[slot], layout=MATRIX).astype(jnp.float32)
                bar = bar * along_rows(inverse, out_shape)
                # The scale of the matrix keeps the cotangent from vanishing in float16.
                out_bar_smem[slot] = (bar * scale).astype(dtype)
                return -jnp.sum(bar * numerator, axis=1) * inverse

            def accumulate(*accumulators):
                blocks_bar, out_bar_sum = accumulators[:count], accumulators[count:]

                def compute(step, slot, normalizer_bar):
                    plgpu.barrier_wait(ready.at[slot])
                    start = first + step * TILE
                    denominator_bar = normalize(start, slot) if normalized else None

                    def queries():
                        x = plgpu.load(query_smem.at[slot], layout=MATRIX)
                        return x.astype(jnp.float32)

                    phi = compute_features(parts, queries(), phi_smem, 0, dtype)
                    if normalized:
                        along = along_rows(denominator_bar, shape)
                        normalizer_bar = tuple(
                            bar + phi[p].astype(jnp.float32) * along
                            for p, bar in enumerate(normalizer_bar)
                        )
                    plgpu.commit_smem()
                    cotangent = out_bar_smem.at[slot]
                    for p in range(count):
                        rows = feature_operand(parts, query_smem.at[slot], phi_smem, p, 0)
                        plgpu.wgmma(blocks_bar[p], transposed(rows), cotangent)
                    for acc in out_bar_sum:
                        plgpu.wgmma(acc, transposed(cotangent), transposed(ones))

                    query_bar = None
                    for p, derivative in enumerate(parts.derivatives):

                        def multiply(acc, p=p):
                            plgpu.wgmma(acc, cotangent, transposed(blocks_smem.at[p]))
                            return acc[...]

                        phi_bar = pl.run_scoped(multiply, plgpu.ACC(shape))
                        if normalized:
                            weight = plgpu.load(normalizer_smem.at[p, here], layout=PER_COLUMN)
                            along = along_rows(denominator_bar, shape)
                            phi_bar = phi_bar + along * along_columns(weight, shape)
                        else:
                            phi_bar = phi_bar * scale
                        term = phi_bar * derivative(queries())
                        query_bar = term if query_bar is None else query_bar + term
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    query_bar_smem[...] = query_bar.astype(dtype)
                    plgpu.commit_smem()
                    tokens = pl.ds(start, TILE)
                    plgpu.copy_smem_to_gmem(query_bar_smem, query_bar_ref.at[b, tokens, h, here])
                    return normalizer_bar

                zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)
                carry = (zeros,) * (count * normalized)
                normalizer_bar = stream(steps, STAGES, load, compute, carry)
                plgpu.wait_smem_to_gmem(0)
                last_bar = tuple(jnp.sum(bar, axis=0) for bar in normalizer_bar)
                if parts.constant:
                    last_bar = tuple(token_sum(acc) for acc in out_bar_sum)
                return tuple(acc[...] for acc in blocks_bar), last_bar

            return pl.run_scoped(
                accumulate,
                *(plgpu.ACC(out_shape) for _ in range(count)),
                *(plgpu.ACC((padded_columns, SUM_COLUMNS)) for _ in range(parts.constant)),
            )

        whole = ()
        if need_all:
            whole = (
                operand((STAGES, TILE, padded_dim), dtype),
                operand((count, padded_dim, padded_columns), dtype),
                operand((count, TILE, padded_dim), dtype),
            )
        blocks_bar, last_bar = pl.run_scoped(
            pipeline,
            operand((STAGES, TILE, TILE), dtype),
            operand((STAGES, *out_shape), dtype),
            operand((count, *out_shape), dtype),
            operand((max(count - parts.first_is_identity, 1), *shape), dtype),
            operand(shape, dtype),
            operand((SUM_COLUMNS, TILE), dtype),
            plgpu.SMEM((count, padded_dim), jnp.float32),
            whole,
            plgpu.Barrier(num_arrivals=2 + need_all, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1 + count * (1 + need_all) + normalized),
        )

        def write(blocks_bar_smem, last_bar_smem):
            for p in range(count):
                bar = blocks_bar[p] / scale if normalized else blocks_bar[p]
                blocks_bar_smem[p] = bar
            for p, bar in enumerate(last_bar):
                last_bar_smem[p] = bar
            plgpu.commit_smem()
            for p in range(count):
                target = blocks_bar_ref.at[group, b, h, p, here, :]
                plgpu.copy_smem_to_gmem(blocks_bar_smem.at[p], target)
            if normalized:
                plgpu.copy_smem_to_gmem(last_bar_smem, last_bar_ref.at[group, b, h, :, here])
            else:

                @pl.when(i == 0)
                def _():
                    plgpu.copy_smem_to_gmem(last_bar_smem, last_bar_ref.at[group, b, h])

            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            write,
            operand((count, *out_shape), jnp.float32),
            plgpu.SMEM((count, TILE) if normalized else last_shape, jnp.float32),
        )

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
        grid=(batch, heads, groups, dims),
        grid_names=("batch", "head", "group", "dim"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="read_out_backward",
    )(*arguments)
