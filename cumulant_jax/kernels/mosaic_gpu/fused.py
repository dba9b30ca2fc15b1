"""Short sequences in one pass: one thread block per head sums the moments and reads them out.

Tiles of keys and values stream past the accumulators; the small algebra from moments to the
read-out matrix happens in registers; then tiles of queries stream past the matrix. Keys and values
are read once (the first keys, for the pivot, once more from the cache), outputs written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.features import PolynomialFeatures
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
    mask_rows,
    ones_operand,
    operand,
    token_sum,
    transposed,
    valid_rows,
)
from cumulant_jax.kernels.mosaic_gpu.read_out import QueryFeatures, row_product
from cumulant_jax.kernels.mosaic_gpu.token_tiles import TokenTiles, align_dim

STAGES = 2
PIVOT_TILES = 2
SHAPE = (TILE, TILE)


def fused_cumulant(
    features: PolynomialFeatures,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    *,
    reduction_is_sum: bool,
    return_sums: bool = True,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Cumulant attention of short sequences in one pass.

    Args:
      features: monomials of order 2, 3 (diagonal) or 4.
      query: [batch, queries, heads, dim], bfloat16 or float16, dim at most 64.
      key: [batch, keys, heads, dim].
      value: [batch, keys, heads, value_dim], value_dim at most 64.
      mask: None or bool [batch, keys, heads or 1]; masked tokens may hold anything.
      scale: float32 [batch, heads], the factor on the queries.
      reduction_is_sum: multiply by the number of tokens, the paper's literal form.
      return_sums: whether to write the moments, which the backward pass needs.

    Returns:
      The output [batch, queries, heads, value_dim], the moments float32 [batch, heads, features,
      value_dim + 1] or None, and the pivots of keys [batch, heads, dim] and of values
      [batch, heads, value_dim] that they are measured from (the latter zeros: the values are
      summed as they are, in float32).
    """
    out, sums, pivot = _run_fused(
        features, query, key, value, mask, scale, reduction_is_sum, None, return_sums
    )
    batch, _, heads, value_dim = value.shape
    return out, sums, pivot, jnp.zeros((batch, heads, value_dim), jnp.float32)


def fused_linear(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    normalizer_eps: float,
    return_sums: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Linear attention of short sequences in one pass.

    Args:
      features: `elu1`, `jax.nn.relu` or `jnp.exp`.
      query: [batch, queries, heads, dim], as for `fused_cumulant`, already scaled.
      key: see there, like the other arrays.
      value: see there.
      mask: see there.
      normalizer_eps: what is added to the normalizer.
      return_sums: whether to write the moments, which the backward pass needs.

    Returns:
      The output [batch, queries, heads, value_dim] and the moments float32 [batch, heads, dim,
      value_dim + 1] about zero, or None.
    """
    scale = jnp.ones((query.shape[0], query.shape[2]), jnp.float32)
    return _run_fused(features, query, key, value, mask, scale, False, normalizer_eps, return_sums)[
        :2
    ]


def centred_blocks(
    moments: Sequence[jax.Array], feature_sums: Sequence[jax.Array], mean_value, count, scale
) -> list[jax.Array]:
    """The blocks of `cumulants.read_out_matrix` in registers, from sums about a pivot.

    Args:
      moments: for each degree the sums of key monomial times value, [dim, value_dim].
      feature_sums: for each degree the sums of the key monomial, [dim].
      mean_value: [value_dim].
      count: the number of tokens, at least 1.
      scale: factor on the queries.

    Returns:
      For each degree [dim, value_dim], in mean form.
    """
    shape = moments[0].shape
    raw = [moment / count for moment in moments]
    means = [along_rows(total / count, shape) for total in feature_sums]
    mean, value = means[0], along_columns(mean_value, shape)
    covariance = raw[0] - mean * value
    blocks = [scale * covariance]
    if len(raw) >= 2:
        third = raw[1] - 2 * mean * raw[0] - (means[1] - 2 * mean * mean) * value
        blocks.append((scale * scale / 2) * third)
    if len(raw) >= 3:
        square, cube = mean * mean, mean * mean * mean
        fourth = raw[2] - 3 * mean * raw[1] + 3 * square * raw[0] - cube * value
        fourth = fourth - (means[2] - 3 * mean * means[1] + 2 * cube) * value
        fourth = fourth - 3 * (means[1] - square) * covariance
        blocks.append((scale * scale * scale / 6) * fourth)
    return blocks


def _run_fused(
    features, query, key, value, mask, scale, reduction_is_sum, normalizer_eps, return_sums
):
    parts = feature_parts(features)
    batch, num_keys, heads, dim = key.shape
    num_queries, value_dim = query.shape[1], value.shape[-1]
    dtype = query.dtype
    count_parts = len(parts.values)
    query, key, value = align_dim(query), align_dim(key), align_dim(value)
    centre = parts.constant  # the cumulants; linear attention has no pivot
    num_tiles = -(-num_keys // TILE)
    pivot_tiles = 0
    if centre:
        # Unmasked, the first tiles have the mean of a pivot; masked, there is no telling which.
        pivot_tiles = num_tiles if mask is not None else min(PIVOT_TILES, num_tiles)
    pivot_count = min(pivot_tiles * TILE, num_keys)
    first_query = pivot_tiles + num_tiles
    steps = first_query + -(-num_queries // TILE)
    rows = mask_rows(mask, num_tiles * TILE)
    if rows is None:
        counts = jnp.full((batch, heads), num_keys, jnp.float32)
    else:
        counts = jnp.broadcast_to(jnp.sum(rows, axis=-1), (batch, heads))

    out_type = jax.ShapeDtypeStruct((batch, num_queries, heads, value.shape[-1]), dtype)
    query_tiles, key_tiles, value_tiles, out_tiles = (
        TokenTiles.of(x) for x in (query, key, value, out_type)
    )
    query_features = QueryFeatures(parts, query_tiles)
    # Queries follow the keys through the same slots, unless their lengths ask for other layouts.
    apart = []
    if query_tiles != key_tiles:
        apart = [query_tiles.slots(STAGES), plgpu.Barrier(num_barriers=STAGES)]

    def body(*refs):
        query_ref, key_ref, value_ref, scale_ref, count_ref, ones_ref, *refs = refs
        mask_ref = refs.pop(0) if rows is not None else None
        out_ref, pivot_ref, *refs = refs
        sums_refs, refs = (refs[:3], refs[3:]) if return_sums else (None, refs)
        key_smem, value_smem, phi_smem, work_smem, out_smem, ones, mask_smem, vectors, *refs = refs
        ready, value_ready, constants, apart = refs
        query_smem, query_ready = apart or (key_smem, ready)
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        count = count_ref[b, h]

        def load(step, slot):
            @pl.when(step < first_query)
            def _():
                tile = jnp.where(step < pivot_tiles, step, step - pivot_tiles)
                tokens = pl.ds(tile * TILE, TILE)
                index = (b, tokens, h)
                key_tiles.load(key_ref, index, b * 0, key_smem.at[slot], ready.at[slot])

                @pl.when(step >= pivot_tiles)
                def _():
                    target, barrier = value_smem.at[slot], value_ready.at[slot]
                    value_tiles.load(value_ref, index, b * 0, target, barrier)

            @pl.when(step >= first_query)
            def _():
                tokens = pl.ds((step - first_query) * TILE, TILE)
                index = (b, tokens, h)
                query_tiles.load(query_ref, index, b * 0, query_smem.at[slot], query_ready.at[slot])

        def run(start, stop, compute):
            """Steps of the one stream of tiles: those of the pivot, of keys and of queries."""

            def body(step, carry):
                step = lax.convert_element_type(step, jnp.int32) + np.int32(start)
                slot = lax.rem(step, np.int32(STAGES))
                compute(step - start, slot)

                @pl.when(step + STAGES < steps)
                def _():
                    load(step + STAGES, slot)

                return carry

            lax.fori_loop(0, stop - start, body, None)

        def turn(index, vector):
            """Turns one number per row into one per column, through shared memory."""
            vectors[index] = vector
            return plgpu.load(vectors.at[index], layout=PER_COLUMN)

        def mean_key(acc):
            def compute(tile, slot):
                plgpu.barrier_wait(ready.at[slot])
                mask = None
                if mask_ref is not None:
                    mask = plgpu.load(mask_smem.at[tile], layout=PER_ROW)
                keys = key_tiles.prepare(key_smem.at[slot], phi_smem.at[0], mask)
                plgpu.commit_smem()
                plgpu.wgmma(acc, transposed(keys), transposed(ones))
                plgpu.wgmma_wait(0)

            run(0, pivot_tiles, compute)
            tokens = np.float32(pivot_count) if mask is None else jnp.maximum(count, 1)
            return token_sum(acc) / tokens

        def sum_moments(*accumulators):
            moments, phi_sums = accumulators[:count_parts], accumulators[count_parts:]

            def compute(tile, slot):
                plgpu.barrier_wait(ready.at[slot])
                plgpu.barrier_wait(value_ready.at[slot])
                mask = None
                if mask_ref is not None:
                    mask = plgpu.load(mask_smem.at[tile], layout=PER_ROW)
                values = value_tiles.prepare(value_smem.at[slot], work_smem.at[0], mask)
                valid = valid_rows(tile * TILE, num_keys, mask)
                if not parts.keep_zero:
                    # Coordinates that do not exist must not count as features of zero.
                    column = plgpu.broadcasted_iota(jnp.int32, SHAPE, 1, layout=MATRIX)
                    valid = valid & (column < dim)
                x = key_tiles.read(key_smem.at[slot], 0).astype(jnp.float32)
                if centre:
                    pivot = plgpu.load(vectors.at[0], layout=PER_COLUMN)
                    x = x - along_columns(pivot, SHAPE)
                x = jnp.where(valid, x, 0.0)
                for p, function in enumerate(parts.values):
                    phi = function(x)
                    if not parts.keep_zero:
                        phi = jnp.where(valid, phi, 0.0)
                    phi_smem[p] = phi.astype(dtype)
                plgpu.commit_smem()
                for p in range(count_parts):
                    plgpu.wgmma(moments[p], transposed(phi_smem.at[p]), values)
                    plgpu.wgmma(phi_sums[p], transposed(phi_smem.at[p]), transposed(ones))
                for acc in phi_sums[count_parts:]:
                    plgpu.wgmma(acc, transposed(values), transposed(ones))
                plgpu.wgmma_wait(0)

            run(pivot_tiles, first_query, compute)
            return [acc[...] for acc in moments], [token_sum(acc) for acc in phi_sums]

        def read_out(finish):
            """Streams the queries past the matrix, which lies where the features lay."""

            def compute(tile, slot):
                plgpu.barrier_wait(query_ready.at[slot])
                queries = query_smem.at[slot]
                phi = query_features.compute(queries, 0, work_smem)
                plgpu.commit_smem()

                def multiply(acc):
                    query_features.multiply(acc, queries, work_smem, phi_smem)
                    return acc[...]

                out = finish(pl.run_scoped(multiply, plgpu.ACC(SHAPE)), phi)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_tiles.write_whole(out_smem.at[0], out.astype(dtype))
                plgpu.commit_smem()
                index = (b, pl.ds(tile * TILE, TILE), h)
                out_tiles.store(out_ref, index, b * 0, out_smem.at[0])

            run(first_query, steps, compute)

        plgpu.copy_gmem_to_smem(ones_ref, ones, constants)
        if mask_ref is not None:
            for tile in range(num_tiles):
                tokens = pl.ds(tile * TILE, TILE)
                mask_tile = mask_ref.at[b, 0 if mask_ref.shape[1] == 1 else h, tokens]
                plgpu.copy_gmem_to_smem(mask_tile, mask_smem.at[tile], constants)
        for step in range(min(STAGES, steps)):
            load(np.int32(step), step)
        plgpu.barrier_wait(constants)
        if centre:
            pivot = pl.run_scoped(mean_key, plgpu.ACC((TILE, SUM_COLUMNS)))
            vectors[0] = pivot
            pivot_ref[b, h, :] = pivot
        moments, totals = pl.run_scoped(
            sum_moments,
            *(plgpu.ACC(SHAPE) for _ in range(count_parts)),
            *(plgpu.ACC((TILE, SUM_COLUMNS)) for _ in range(count_parts + parts.constant)),
        )
        if sums_refs is not None:
            for p in range(count_parts):
                sums_refs[0][b, h, p] = moments[p]
                sums_refs[1][b, h, p] = totals[p]
            if parts.constant:
                sums_refs[2][b, h] = totals[-1]
        at_least_one = jnp.maximum(count, 1)
        if centre:
            mean_value = turn(1, totals[-1] / at_least_one)
            blocks = centred_blocks(
                moments, totals[:count_parts], mean_value, at_least_one, scale_ref[b, h]
            )
            factor = count if reduction_is_sum else np.float32(1)

            def finish(out, phi):
                return (out + along_columns(mean_value, SHAPE)) * factor
        else:
            # Means, not sums: float16 would overflow.
            blocks = [moment / at_least_one for moment in moments]
            for p in range(count_parts):
                vectors[p] = totals[p] / at_least_one

            def finish(out, phi):
                normalizer = row_product(phi, vectors, 0) + normalizer_eps / at_least_one
                return out * along_rows(1 / normalizer, SHAPE)

        for p, block in enumerate(blocks):
            phi_smem[p] = block.astype(dtype)
        plgpu.commit_smem()
        read_out(finish)
        plgpu.wait_smem_to_gmem(0)

    per_head = (batch, heads)
    out_types = [out_type, jax.ShapeDtypeStruct((*per_head, TILE), jnp.float32)]
    if return_sums:
        out_types += [
            jax.ShapeDtypeStruct((*per_head, count_parts, *SHAPE), jnp.float32),
            jax.ShapeDtypeStruct((*per_head, count_parts, TILE), jnp.float32),
            jax.ShapeDtypeStruct((*per_head, TILE), jnp.float32),
        ]
    arguments = [query, key, value, scale, counts, ones_operand(dtype)]
    if rows is not None:
        arguments.append(rows)
    out, pivot, *written = plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=[
            key_tiles.slots(STAGES),
            value_tiles.slots(STAGES),
            operand((count_parts, *SHAPE), dtype),
            query_features.scratch,
            out_tiles.slots(1),
            operand((SUM_COLUMNS, TILE), dtype),
            plgpu.SMEM((num_tiles, TILE), jnp.float32),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1 + (num_tiles if rows is not None else 0)),
            apart,
        ],
        grid=per_head,
        grid_names=("batch", "head"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="fused_attention",
    )(*arguments)
    sums = None
    if return_sums:
        moments, feature_sums, value_sums = written
        sums = jnp.concatenate(
            [moments[:, :, :, :dim, :value_dim], feature_sums[:, :, :, :dim, None]], axis=-1
        ).reshape(*per_head, -1, value_dim + 1)
        if parts.constant:
            last = jnp.concatenate([value_sums[..., :value_dim], counts[..., None]], axis=-1)
            sums = jnp.concatenate([sums, last[:, :, None]], axis=-2)
    return out[..., :value_dim], sums, pivot[..., :dim]
