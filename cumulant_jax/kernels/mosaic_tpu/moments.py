"""Summing moments over the keys, and the backward pass of that."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_tpu import body
from cumulant_jax.kernels.mosaic_tpu.body import LaneFeatures, Moments
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout, keep
from cumulant_jax.kernels.mosaic_tpu.tiling import BlockSizes, Tiling, call, load, mask_rows, store


def sum_moments(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    *,
    block_sizes: BlockSizes = BlockSizes(),
) -> jax.Array:
    """Sums features(key − pivot) ⊗ (value − pivot, 1) over the unmasked tokens.

    Each step adds the moments of one block of tokens to an output block that stays in VMEM.

    Args:
      features: feature map from dim to `features`.
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1]; masked tokens may hold anything.
      key_pivot: float32 [batch, heads, dim].
      value_pivot: float32 [batch, heads, value_dim].
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      float32 [batch, heads, features, value_dim + 1].
    """
    maps = body.known_features(features)
    operands, specs, tiling, dtype = _operands(
        key, value, mask, key_pivot, value_pivot, block_sizes, split=True
    )
    layout = tiling.layout
    shapes = Moments(
        (layout.value_lanes, maps.degree * layout.lanes),
        (1, maps.degree * layout.lanes),
        (1, layout.value_lanes),
    )
    (sums,) = call(
        functools.partial(_sum_kernel, maps, tiling, dtype),
        (Moments(*(tiling.partial_shape(*shape) for shape in shapes)),),
        name="sum_moments",
        grid=tiling.grid,
        in_specs=specs,
        out_specs=(Moments(*(tiling.partial(*shape) for shape in shapes)),),
        sequential=1,
        flops=tiling.flops(2 * maps.degree),
    )(*operands)
    matrix, feature_sums, value_sums = (jnp.sum(x, axis=0) for x in sums)
    return join_sums(
        layout.unpack_matrix(matrix),
        layout.unpack_rows(feature_sums, values=False),
        layout.unpack_rows(value_sums, values=True) if maps.constant else None,
        _count(key, mask),
    )


def sum_moments_backward(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    sums_bar: jax.Array,
    *,
    block_sizes: BlockSizes = BlockSizes(),
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of key and value, from that of the sums: one pass, one read, one write.

    Args:
      features: as for `sum_moments`, and so on.
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1].
      key_pivot: float32 [batch, heads, dim].
      value_pivot: float32 [batch, heads, value_dim].
      sums_bar: float32 [batch, heads, features, value_dim + 1].
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      Cotangents like key and value; 0 where they are masked.
    """
    maps = body.known_features(features)
    operands, specs, tiling, dtype = _operands(
        key, value, mask, key_pivot, value_pivot, block_sizes, split=False
    )
    layout = tiling.layout
    matrix, feature_sums, value_sums = split_sums(sums_bar, constant=maps.constant)
    bars = Moments(
        layout.pack_matrix(matrix),
        layout.pack_rows(feature_sums, values=False),
        layout.pack_rows(value_sums, values=True),
    )
    keys, values = operands[:2]
    key_bar, value_bar = call(
        functools.partial(_backward_kernel, maps, tiling, dtype),
        (jax.ShapeDtypeStruct(keys.shape, keys.dtype), jax.ShapeDtypeStruct(values.shape, values.dtype)),
        name="sum_moments_backward",
        grid=tiling.grid,
        in_specs=(*specs, Moments(*(tiling.per_group(*x.shape[2:]) for x in bars))),
        out_specs=specs[:2],
        sequential=0,
        flops=tiling.flops(4 * maps.degree),
    )(*operands, bars)
    return layout.unpack_keys(key_bar), layout.unpack_values(value_bar)


def join_sums(
    matrix: jax.Array, features: jax.Array, values: jax.Array | None, count: jax.Array
) -> jax.Array:
    """Puts [..., F, V], [..., F], [..., V] and [...] together as [..., F + 1, V + 1]."""
    sums = jnp.concatenate([matrix, features[..., None]], axis=-1)
    if values is None:
        return sums
    count = jnp.broadcast_to(count, values.shape[:-1])[..., None]
    last = jnp.concatenate([values, count], axis=-1)
    return jnp.concatenate([sums, last[..., None, :]], axis=-2)


def split_sums(sums: jax.Array, *, constant: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The inverse of `join_sums` but for the count; zero for what is not there."""
    rows = sums.shape[-2] - constant
    values = sums[..., -1, :-1] if constant else jnp.zeros_like(sums[..., 0, :-1])
    return sums[..., :rows, :-1], sums[..., :rows, -1], values


def _operands(key, value, mask, key_pivot, value_pivot, sizes, *, split):
    """The arrays that both kernels read, their block specs, the tiling and the matmul dtype."""
    batch, length, heads, dim = key.shape
    layout = HeadLayout(heads, dim, value.shape[-1])
    dtype = jnp.result_type(key, value)
    tiling = Tiling.choose(layout, batch, length, dtype, sizes, split=split)
    masks = () if mask is None else (layout.pack_mask(mask),)
    operands = (
        layout.pack_keys(key),
        layout.pack_values(value),
        masks,
        layout.pack_rows(key_pivot, values=False),
        layout.pack_rows(value_pivot, values=True),
    )
    specs = (
        tiling.per_token(layout.lanes),
        tiling.per_token(layout.value_lanes),
        tuple(tiling.mask(x) for x in masks),
        tiling.per_group(1, layout.lanes),
        tiling.per_group(1, layout.value_lanes),
    )
    return operands, specs, tiling, dtype


def _count(key: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The number of unmasked tokens, [batch, heads or 1]."""
    if mask is None:
        return jnp.full((key.shape[0], 1), key.shape[1], jnp.float32)
    return jnp.sum(mask, axis=1, dtype=jnp.float32)


def _centred(tiling: Tiling, group: int, key_ref, value_ref, mask_refs, key_pivot, value_pivot):
    """One group's keys and values about their pivots, and where they are valid."""
    layout = tiling.layout
    mask = mask_rows(mask_refs, group)
    valid = tiling.valid(group, layout.lanes, mask)
    valid_value = valid
    if layout.value_lanes != layout.lanes:
        valid_value = tiling.valid(group, layout.value_lanes, mask)
    key = keep(load(key_ref, group, layout.lanes) - key_pivot[0, group], valid)
    value = keep(load(value_ref, group, layout.value_lanes) - value_pivot[0, group], valid_value)
    return key, value, valid, valid_value


def _sum_kernel(
    features: LaneFeatures,
    tiling: Tiling,
    dtype,
    key_ref,
    value_ref,
    mask_refs,
    key_pivot,
    value_pivot,
    sums: Moments,
):
    @pl.when(pl.program_id(3) == 0)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    for group in range(tiling.step_groups):
        key, value, valid, _ = _centred(
            tiling, group, key_ref, value_ref, mask_refs, key_pivot, value_pivot
        )
        part = body.sum_moments(features, dtype, key, value, valid)
        for ref, x in zip(sums, part, strict=True):
            ref[0, group] += x


def _backward_kernel(
    features: LaneFeatures,
    tiling: Tiling,
    dtype,
    key_ref,
    value_ref,
    mask_refs,
    key_pivot,
    value_pivot,
    bars: Moments,
    key_bar_ref,
    value_bar_ref,
):
    layout = tiling.layout
    for group in range(tiling.step_groups):
        key, value, valid, valid_value = _centred(
            tiling, group, key_ref, value_ref, mask_refs, key_pivot, value_pivot
        )
        _, pull = jax.vjp(
            lambda key, value, valid=valid: body.sum_moments(features, dtype, key, value, valid),
            key,
            value,
        )
        key_bar, value_bar = pull(Moments(*(ref[0, group] for ref in bars)))
        store(key_bar_ref, group, layout.lanes, keep(key_bar, valid))
        store(value_bar_ref, group, layout.value_lanes, keep(value_bar, valid_value))
