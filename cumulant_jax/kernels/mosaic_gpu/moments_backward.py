"""The pass back through the sums of moments: gradients of keys and values in one read of both.

With dM the cotangent of the sums, every token gets value_bar = features(key) dM and, block by block
of the features, key_bar = (value dMᵀ) · features′(key). Values enter as they are; what the pivot
and the column of ones contribute is one number per feature, computed outside from the same rounded
dM that multiplies the values.
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
    PER_COLUMN,
    PER_ROW,
    TILE,
    along_columns,
    along_rows,
    columns_of,
    mask_rows,
    operand,
    pad_last,
    split_tiles,
    stream,
    total,
    transposed,
    valid_rows,
)
from cumulant_jax.kernels.mosaic_gpu.read_out import matrix_operand
from cumulant_jax.kernels.mosaic_gpu.token_tiles import TokenTiles, align_dim

BLOCKS = 396
FEWEST_TILES = 4
STAGES = 2


def sum_moments_backward(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    sums_bar: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Pulls a cotangent of the sums back to keys and values.

    Args:
      features: a feature map that `feature_parts` knows.
      key: [batch, tokens, heads, dim], bfloat16 or float16.
      value: [batch, tokens, heads, value_dim], of the same dtype.
      mask: None or bool [batch, tokens, heads or 1]; masked tokens may hold anything.
      key_pivot: float32 [batch, heads, dim].
      value_pivot: float32 [batch, heads, value_dim].
      sums_bar: float32 [batch, heads, features, value_dim + 1].

    Returns:
      The cotangents of key and value, in their shapes and dtype; zero where masked.
    """
    parts = feature_parts(features)
    dim, value_dim = key.shape[-1], value.shape[-1]
    count = len(parts.values)
    matrix = matrix_operand(parts, sums_bar[..., :-1], dim, key.dtype, normalized=False)
    ones_bar = sums_bar[:, :, : count * dim, -1].reshape(*sums_bar.shape[:2], count, dim)
    rounded = matrix.blocks[..., :dim, :value_dim].astype(jnp.float32)
    pivoted = jnp.einsum("bhpdv,bhv->bhpd", rounded, value_pivot, precision="highest")
    offset = ones_bar - matrix.scale[:, :, None, None] * pivoted
    key_bar, value_bar = _run_backward(
        parts, align_dim(key), align_dim(value), mask, key_pivot, matrix, offset
    )
    return key_bar[..., :dim], value_bar[..., :value_dim]


def _run_backward(parts, key, value, mask, key_pivot, matrix, offset):
    batch, length, heads, _ = key.shape
    dtype = key.dtype
    count, padded_dim, padded_values = matrix.blocks.shape[2:]
    dims = padded_dim // TILE
    tiles = -(-length // TILE)
    groups, steps = split_tiles(tiles, batch * heads, blocks=BLOCKS, fewest=FEWEST_TILES)
    rows = mask_rows(mask, groups * steps * TILE)
    shape, values_shape = (TILE, TILE), (TILE, padded_values)
    key_tiles, value_tiles = TokenTiles.of(key), TokenTiles.of(value)
    # Wide heads have work and registers for two warpgroups: one per gradient.
    wide = max(padded_dim, padded_values) > TILE
    arrivals = key_tiles.copies + value_tiles.copies + (rows is not None)

    def body(*refs):
        key_ref, value_ref, pivot_ref, blocks_ref, scale_ref, constant_ref, offset_ref, *refs = refs
        mask_ref = refs.pop(0) if rows is not None else None
        key_bar_ref, value_bar_ref, *scratch = refs
        key_smem, value_smem, mask_smem, phi_smem, key_bar_smem, value_bar_smem, *scratch = scratch
        blocks_smem, pivot_smem, offset_smem, constant_smem, rewritten, *scratch = scratch
        ready, constants, shared = scratch
        operand_smem = rewritten[0].at[0] if rewritten else None
        b, h, group = (lax.axis_index(name) for name in ("batch", "head", "group"))
        first = group * (steps * TILE)

        def load(step, slot):
            tokens = pl.ds(first + step * TILE, TILE)
            index = (b, tokens, h)
            key_tiles.load(key_ref, index, b * 0, key_smem.at[slot], ready.at[slot])
            value_tiles.load(value_ref, index, b * 0, value_smem.at[slot], ready.at[slot])
            if mask_ref is not None:
                mask_head = 0 if mask_ref.shape[1] == 1 else h
                plgpu.copy_gmem_to_smem(
                    mask_ref.at[b, mask_head, tokens], mask_smem.at[slot], ready.at[slot]
                )

        def load_constants():
            for p in range(count):
                plgpu.copy_gmem_to_smem(blocks_ref.at[b, h, p], blocks_smem.at[p], constants)
            plgpu.copy_gmem_to_smem(pivot_ref.at[b, h], pivot_smem, constants)
            plgpu.copy_gmem_to_smem(offset_ref.at[b, h], offset_smem, constants)
            plgpu.copy_gmem_to_smem(constant_ref.at[b, h], constant_smem, constants)

        scale = scale_ref[b, h]

        def mask_of(slot):
            return None if mask_ref is None else plgpu.load(mask_smem.at[slot], layout=PER_ROW)

        def centred(c, slot, valid):
            pivot = plgpu.load(pivot_smem.at[columns_of(c)], layout=PER_COLUMN)
            x = key_tiles.read(key_smem.at[slot], c)
            return jnp.where(valid, x.astype(jnp.float32) - along_columns(pivot, shape), 0.0)

        def pull_back_values(step, slot):
            start, mask = first + step * TILE, mask_of(slot)
            valid = valid_rows(start, length, mask)
            for c in range(dims):
                x = centred(c, slot, valid)
                for p, function in enumerate(parts.values):
                    phi_smem[p, :, columns_of(c)] = function(x).astype(dtype)
            plgpu.commit_smem()

            def multiply_features(acc):
                for c in range(dims):
                    for p in range(count):
                        plgpu.wgmma(
                            acc,
                            phi_smem.at[p, :, columns_of(c)],
                            blocks_smem.at[p, columns_of(c)],
                        )
                return acc[...]

            value_bar = pl.run_scoped(multiply_features, plgpu.ACC(values_shape)) * scale
            if parts.constant:
                constant = plgpu.load(constant_smem, layout=PER_COLUMN)
                value_bar = value_bar + along_columns(constant, values_shape)
            if mask is not None:
                value_bar = jnp.where(along_rows(mask, values_shape) > 0, value_bar, 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            value_tiles.write_whole(value_bar_smem.at[0], value_bar.astype(dtype))
            plgpu.commit_smem()
            index = (b, pl.ds(start, TILE), h)
            value_tiles.store(value_bar_ref, index, b * 0, value_bar_smem.at[0])

        def pull_back_keys(step, slot):
            start = first + step * TILE
            values = value_tiles.prepare(value_smem.at[slot], operand_smem)
            if rewritten:
                plgpu.commit_smem()
            valid = valid_rows(start, length, mask_of(slot))
            if wide:  # otherwise `pull_back_values` has waited
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(dims):
                terms = []
                for p, derivative in enumerate(parts.derivatives):

                    def multiply_values(acc, c=c, p=p):
                        plgpu.wgmma(acc, values, transposed(blocks_smem.at[p, columns_of(c)]))
                        return acc[...]

                    # What follows a product is loaded after it, to save registers.
                    phi_bar = pl.run_scoped(multiply_values, plgpu.ACC(shape)) * scale
                    added = plgpu.load(offset_smem.at[p, columns_of(c)], layout=PER_COLUMN)
                    bar = phi_bar + along_columns(added, shape)
                    terms.append(bar * derivative(centred(c, slot, valid)))
                key_bar = jnp.where(valid, total(terms), 0.0).astype(dtype)
                key_tiles.write(key_bar_smem.at[0], c, key_bar)
            plgpu.commit_smem()
            index = (b, pl.ds(start, TILE), h)
            key_tiles.store(key_bar_ref, index, b * 0, key_bar_smem.at[0])

        def compute_both(step, slot, carry):
            plgpu.barrier_wait(ready.at[slot])
            pull_back_values(step, slot)
            pull_back_keys(step, slot)
            return carry

        def share(compute, *, loads):
            """What one of two warpgroups does; the one that loads waits for the other."""
            (consumed,) = shared

            def body(step, carry):
                step = lax.convert_element_type(step, jnp.int32)
                slot = lax.rem(step, np.int32(STAGES))
                free = lax.rem(step + (STAGES - 1), np.int32(STAGES))
                if loads:

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_wait(consumed.at[free])

                        @pl.when(step + (STAGES - 1) < steps)
                        def _():
                            load(step + (STAGES - 1), free)

                plgpu.barrier_wait(ready.at[slot])
                compute(step, slot)
                plgpu.barrier_arrive(consumed.at[slot])
                return carry

            if loads:
                load_constants()
                for step in range(min(STAGES, steps)):
                    load(np.int32(step), step)
            plgpu.barrier_wait(constants)
            lax.fori_loop(0, steps, body, None)
            if loads:
                plgpu.barrier_wait(consumed.at[(steps - 1) % STAGES])

        if wide:

            @pl.when(lax.axis_index("warpgroup") == 0)
            def _():
                share(pull_back_values, loads=True)

            @pl.when(lax.axis_index("warpgroup") == 1)
            def _():
                share(pull_back_keys, loads=False)

        else:
            load_constants()
            plgpu.barrier_wait(constants)
            stream(steps, STAGES, load, compute_both, None)
        plgpu.wait_smem_to_gmem(0)

    arguments = [
        key,
        value,
        pad_last(key_pivot, padded_dim),
        matrix.blocks,
        matrix.scale,
        matrix.constant,
        pad_last(offset, padded_dim),
    ]
    if rows is not None:
        arguments.append(rows)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)],
        scratch_types=[
            key_tiles.slots(STAGES),
            value_tiles.slots(STAGES),
            plgpu.SMEM((STAGES, TILE), jnp.float32),
            operand((count, TILE, padded_dim), dtype),
            key_tiles.slots(1),
            value_tiles.slots(1),
            operand((count, padded_dim, padded_values), dtype),
            plgpu.SMEM((padded_dim,), jnp.float32),
            plgpu.SMEM((count, padded_dim), jnp.float32),
            plgpu.SMEM((padded_values,), jnp.float32),
            value_tiles.rewritten(),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=count + 3),
            [plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)] * wide,
        ],
        grid=(batch, heads, groups),
        grid_names=("batch", "head", "group"),
        **({"num_threads": 2, "thread_name": "warpgroup"} if wide else {}),
        compiler_params=COMPILER_PARAMS,
        kernel_name="sum_moments_backward",
    )(*arguments)
