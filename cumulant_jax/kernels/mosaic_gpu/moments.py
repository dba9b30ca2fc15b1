"""Sums of key features times values over the tokens, and the pass back through them.

The sums are a product (features of the keys)ᵀ (values) per head: tokens are the contracted axis, so
the features, formed in float32 about the pivot and rounded to 16 bits, are the transposed operand
of a wgmma, and the values go from TMA to the tensor core as they are. Values are not centred
first: the pivot is taken off the sums in float32, which for 16-bit values loses less than rounding
the centred ones would.

Rounding key − pivot shifts all keys of one binade alike, so the sum of the features may be off by a
common shift of up to half a unit in the last place. The centred moments do not see it: their mean
is that of the same rounded features. In float16 a square overflows where a key is more than 255
from the pivot, a cube at 40.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_gpu.feature_parts import FeatureParts, feature_parts
from cumulant_jax.kernels.mosaic_gpu.layout import (
    COMPILER_PARAMS,
    PER_COLUMN,
    PER_ROW,
    SUM_COLUMNS,
    TILE,
    along_columns,
    mask_rows,
    ones_operand,
    operand,
    pad_last,
    round_up,
    split_tiles,
    stream,
    token_sum,
    transposed,
    valid_rows,
)
from cumulant_jax.kernels.mosaic_gpu.token_tiles import TokenTiles, align_dim

BLOCKS = 396  # three thread blocks on each of 132 multiprocessors
FEWEST_TILES = 4
# A split writes moments of its own: at most one byte for so many that it reads.
READ_PER_WRITTEN = 4
STAGES = 3


def sum_moments(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
) -> jax.Array:
    """Sums features(key − pivot) ⊗ (value − pivot, 1) over the unmasked tokens.

    Args:
      features: a feature map that `feature_parts` knows.
      key: [batch, tokens, heads, dim], bfloat16 or float16.
      value: [batch, tokens, heads, value_dim], of the same dtype.
      mask: None or bool [batch, tokens, heads or 1]; masked tokens may hold anything.
      key_pivot: float32 [batch, heads, dim].
      value_pivot: float32 [batch, heads, value_dim].

    Returns:
      float32 [batch, heads, features, value_dim + 1].
    """
    sums = split_moments(features, key, value, mask, key_pivot, value_pivot)
    return jnp.sum(sums, axis=0)


def split_moments(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    *,
    tiles_per_split: int | None = None,
) -> jax.Array:
    """As `sum_moments`, over consecutive stretches of tokens: [splits, batch, heads, …].

    Args:
      features: as in `sum_moments`, like the other arrays.
      key: see there.
      value: see there.
      mask: see there.
      key_pivot: see there.
      value_pivot: see there.
      tiles_per_split: tiles of 64 tokens in a stretch; None for what fills the chip,
        as far as the moments stay a quarter of the bytes read.
    """
    parts = feature_parts(features)
    batch, length, heads, dim = key.shape
    value_dim = value.shape[-1]
    key, value = align_dim(key), align_dim(value)
    steps = tiles_per_split
    if steps is None:
        independent = batch * heads * -(-dim // TILE) * -(-value_dim // _value_chunk(parts, value))
        _, steps = split_tiles(
            -(-length // TILE),
            independent,
            blocks=BLOCKS,
            fewest=FEWEST_TILES,
            least=_least_tiles(parts, key, value),
        )
    splits = -(-length // (steps * TILE))
    rows = mask_rows(mask, splits * steps * TILE)
    blocks, feature_sums, value_sums = _run_moments(parts, key, value, rows, key_pivot, steps)

    blocks, feature_sums = blocks[..., :dim, :value_dim], feature_sums[..., :dim, None]
    blocks = blocks - feature_sums * value_pivot[:, :, None, None]
    sums = jnp.concatenate([blocks, feature_sums], axis=-1)
    sums = sums.reshape(splits, batch, heads, -1, value_dim + 1)
    if not parts.constant:
        return sums
    counts = _counts(rows, length, (splits, batch, heads, 1))
    value_sums = value_sums[..., :value_dim] - counts * value_pivot
    last = jnp.concatenate([value_sums, counts], axis=-1)
    return jnp.concatenate([sums, last[..., None, :]], axis=-2)


def _counts(rows, length, shape):
    """The number of tokens in each split."""
    splits, batch, *_ = shape
    if rows is None:
        tokens = round_up(-(-length // splits))
        counts = jnp.clip(length - tokens * jnp.arange(splits), 0, tokens).astype(jnp.float32)
        return jnp.broadcast_to(counts[:, None, None, None], shape)
    counts = jnp.sum(rows.reshape(batch, rows.shape[1], splits, -1), axis=-1)
    return jnp.broadcast_to(jnp.moveaxis(counts, 2, 0)[..., None], shape)


def _value_chunk(parts: FeatureParts, value: jax.Array) -> int:
    """Columns of the values per thread block: the accumulators must fit in its registers."""
    wide = value.shape[-1] > TILE and len(parts.values) <= 2 and TokenTiles.of(value).blocked
    return 2 * TILE if wide else TILE


def _least_tiles(parts: FeatureParts, key: jax.Array, value: jax.Array) -> int:
    """Tiles in a split for its moments to be at most a quarter of the bytes that it reads."""
    dim, value_dim = key.shape[-1], value.shape[-1]
    columns = round_up(value_dim, _value_chunk(parts, value))
    written = 4 * len(parts.values) * round_up(dim) * columns
    read = TILE * (dim + value_dim) * key.dtype.itemsize
    return -(-READ_PER_WRITTEN * written // read)


def _run_moments(parts, key, value, rows, key_pivot, steps):
    """The kernel: float32 [splits, batch, heads, parts, padded dim, padded value dim] and sums."""
    batch, length, heads, dim = key.shape
    dtype = key.dtype
    chunk = _value_chunk(parts, value)
    dims = -(-dim // TILE)
    chunks = -(-value.shape[-1] // chunk)
    count = len(parts.values)
    splits = -(-length // (steps * TILE))
    shape = (TILE, TILE)
    key_tiles, value_tiles = TokenTiles.of(key, TILE), TokenTiles.of(value, chunk)
    arrivals = key_tiles.copies + value_tiles.copies + (rows is not None)

    def body(*refs):
        key_ref, value_ref, pivot_ref, ones_ref, *refs = refs
        mask_ref = refs.pop(0) if rows is not None else None
        blocks_ref, feature_sums_ref, value_sums_ref, *scratch = refs
        key_smem, value_smem, mask_smem, phi_smem, ones, pivot_smem, *scratch = scratch
        rewritten, ready, constants = scratch
        operand_smem = rewritten[0].at[0] if rewritten else None
        b, h, split = (lax.axis_index(name) for name in ("batch", "head", "split"))
        i, j = lax.axis_index("dim"), lax.axis_index("value_dim")
        first = split * (steps * TILE)
        dims_here, values_here = pl.ds(i * TILE, TILE), pl.ds(j * chunk, chunk)

        def load(step, slot):
            tokens = pl.ds(first + step * TILE, TILE)
            index = (b, tokens, h)
            key_tiles.load(key_ref, index, i * TILE, key_smem.at[slot], ready.at[slot])
            value_tiles.load(value_ref, index, j * chunk, value_smem.at[slot], ready.at[slot])
            if mask_ref is not None:
                mask_tile = mask_ref.at[b, 0 if mask_ref.shape[1] == 1 else h, tokens]
                plgpu.copy_gmem_to_smem(mask_tile, mask_smem.at[slot], ready.at[slot])

        plgpu.copy_gmem_to_smem(ones_ref, ones, constants)
        plgpu.copy_gmem_to_smem(pivot_ref.at[b, h, dims_here], pivot_smem, constants)

        def accumulate(*accumulators):
            moments, phi_sums = accumulators[:count], accumulators[count : 2 * count]
            value_sum = accumulators[2 * count :]  # empty where nothing needs it

            def compute(step, slot, carry):
                plgpu.barrier_wait(ready.at[slot])
                mask = None
                if mask_ref is not None:
                    mask = plgpu.load(mask_smem.at[slot], layout=PER_ROW)
                values = value_tiles.prepare(value_smem.at[slot], operand_smem, mask)
                valid = valid_rows(first + step * TILE, length, mask)
                pivot = along_columns(plgpu.load(pivot_smem, layout=PER_COLUMN), shape)
                x = key_tiles.read(key_smem.at[slot], 0).astype(jnp.float32)
                x = jnp.where(valid, x - pivot, 0.0)
                for p, function in enumerate(parts.values):
                    phi = function(x)
                    if not parts.keep_zero:
                        phi = jnp.where(valid, phi, 0.0)
                    phi_smem[p] = phi.astype(dtype)
                plgpu.commit_smem()
                for p in range(count):
                    plgpu.wgmma(moments[p], transposed(phi_smem.at[p]), values)
                    plgpu.wgmma(phi_sums[p], transposed(phi_smem.at[p]), transposed(ones))
                for acc in value_sum:
                    plgpu.wgmma(acc, transposed(values), transposed(ones))
                plgpu.wgmma_wait(0)
                return carry

            plgpu.barrier_wait(constants)
            stream(steps, STAGES, load, compute, None)
            for p in range(count):
                blocks_ref[split, b, h, p, dims_here, values_here] = moments[p][...]

            @pl.when(j == 0)
            def _():
                for p in range(count):
                    feature_sums_ref[split, b, h, p, dims_here] = token_sum(phi_sums[p])

            @pl.when(i == 0)
            def _():
                for acc in value_sum:
                    value_sums_ref[split, b, h, values_here] = token_sum(acc)

        pl.run_scoped(
            accumulate,
            *(plgpu.ACC((TILE, chunk)) for _ in range(count)),
            *(plgpu.ACC((TILE, SUM_COLUMNS)) for _ in range(count)),
            *(plgpu.ACC((chunk, SUM_COLUMNS)) for _ in range(parts.constant)),
        )

    per_head = (splits, batch, heads)
    arguments = [key, value, pad_last(key_pivot, dims * TILE), ones_operand(dtype)]
    if rows is not None:
        arguments.append(rows)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((*per_head, count, dims * TILE, chunks * chunk), jnp.float32),
            jax.ShapeDtypeStruct((*per_head, count, dims * TILE), jnp.float32),
            jax.ShapeDtypeStruct((*per_head, chunks * chunk), jnp.float32),
        ],
        scratch_types=[
            key_tiles.slots(STAGES),
            value_tiles.slots(STAGES),
            plgpu.SMEM((STAGES, TILE), jnp.float32),
            operand((count, TILE, TILE), dtype),
            operand((SUM_COLUMNS, TILE), dtype),
            plgpu.SMEM((TILE,), jnp.float32),
            value_tiles.rewritten(),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(batch, heads, splits, dims, chunks),
        grid_names=("batch", "head", "split", "dim", "value_dim"),
        compiler_params=COMPILER_PARAMS,
        kernel_name="sum_moments",
    )(*arguments)
