"""Short sequences: one pass that keeps all tokens of a few heads in VMEM.

Queries, keys and values are read once and the output is written once; moments and read-out matrix
never leave the chip. The backward pass recomputes them, which costs no memory traffic: at 197
tokens, reading them back would cost more than reading the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_tpu import body
from cumulant_jax.kernels.mosaic_tpu.algebra import cumulant_weights, linear_weights
from cumulant_jax.kernels.mosaic_tpu.body import LaneFeatures
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout, all_of, keep
from cumulant_jax.kernels.mosaic_tpu.tiling import (
    DEFAULT_SIZES,
    BlockSizes,
    Tiling,
    call,
    groups_per_step,
    load,
    mask_rows,
    store,
)

# attend(query, key, value, scale, valid_key, valid_value) -> out, for one group of heads.
Attend = Callable[..., jax.Array]


def fused_cumulant(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    *,
    reduction_is_sum: bool,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> jax.Array:
    """Cumulant attention over a short sequence, in one kernel.

    Args:
      features: the monomials, diagonal, of order 2 to 4.
      query: [batch, queries, heads, dim].
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1].
      scale: float32 [batch, heads], factor on the queries.
      reduction_is_sum: multiply by the number of tokens, the paper's literal form.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      [batch, queries, heads, value_dim] in the dtype of value.
    """
    attend = functools.partial(_cumulant, body.known_features(features), reduction_is_sum)
    return _forward(attend, query, key, value, mask, scale, block_sizes)


def fused_cumulant_backward(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    out_bar: jax.Array,
    *,
    reduction_is_sum: bool,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key, value and scale [batch, heads] of `fused_cumulant`.

    Args:
      features: as for `fused_cumulant`, and so on.
      query: [batch, queries, heads, dim].
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1].
      scale: float32 [batch, heads].
      out_bar: [batch, queries, heads, value_dim].
      reduction_is_sum: as in the forward pass.
      block_sizes: sizes of the blocks in VMEM.
    """
    attend = functools.partial(_cumulant, body.known_features(features), reduction_is_sum)
    bars, scale_bar = _backward(attend, query, key, value, mask, scale, out_bar, block_sizes)
    return *bars, scale_bar[0]


def fused_linear(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    normalizer_eps: float,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> jax.Array:
    """Linear attention over a short sequence, in one kernel.

    Args:
      features: elu1, relu or exp.
      query: [batch, queries, heads, dim], already scaled.
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1].
      normalizer_eps: added to the denominator.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      [batch, queries, heads, value_dim] in the dtype of value.
    """
    attend = functools.partial(_linear, body.known_features(features), normalizer_eps)
    return _forward(attend, query, key, value, mask, None, block_sizes)


def fused_linear_backward(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    out_bar: jax.Array,
    *,
    normalizer_eps: float,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key and value of `fused_linear`.

    Args:
      features: as for `fused_linear`, and so on.
      query: [batch, queries, heads, dim].
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, value_dim].
      mask: None or bool [batch, tokens, heads or 1].
      out_bar: [batch, queries, heads, value_dim].
      normalizer_eps: added to the denominator.
      block_sizes: sizes of the blocks in VMEM.
    """
    attend = functools.partial(_linear, body.known_features(features), normalizer_eps)
    return _backward(attend, query, key, value, mask, None, out_bar, block_sizes)[0]


def _cumulant(
    features: LaneFeatures,
    reduction_is_sum: bool,
    layout: HeadLayout,
    dtype,
    query,
    key,
    value,
    scale,
    valid,
    counts,
):
    pivots = [
        lax.stop_gradient(jnp.sum(x, axis=0, keepdims=True) / jnp.maximum(count, 1))
        for x, count in zip((key, value), counts, strict=True)
    ]
    key, value = (
        keep(x - pivot, v) for x, pivot, v in zip((key, value), pivots, valid, strict=True)
    )
    weights = cumulant_weights(
        features.degree,
        layout,
        body.sum_moments(features, dtype, key, value, valid[0]),
        counts[0],
        counts[1],
        pivots[1],
        scale,
        reduction_is_sum=reduction_is_sum,
    )
    return body.read_out(features, dtype, None, query, weights)


def _linear(
    features: LaneFeatures, eps, layout: HeadLayout, dtype, query, key, value, scale, valid, counts
):
    del scale, counts
    own = all_of(valid[0], layout.own_lanes(key.shape[0]))
    weights = linear_weights(layout, body.sum_moments(features, dtype, key, value, own))
    return body.read_out(features, dtype, eps, query, weights)


def _forward(attend: Attend, query, key, value, mask, scale, sizes) -> jax.Array:
    operands, specs, queries, keys, dtype = _operands(query, key, value, mask, scale, sizes, 4)
    layout = queries.layout
    shape = (*query.shape[:2], layout.heads * layout.head_value_lanes)
    out = call(
        functools.partial(_forward_kernel, attend, queries, keys, dtype),
        jax.ShapeDtypeStruct(shape, value.dtype),
        name="fused_attention",
        grid=queries.grid,
        in_specs=specs,
        out_specs=queries.per_token(layout.value_lanes),
        sequential=0,
        flops=queries.flops(4) + keys.flops(4),
    )(*operands)
    return layout.unpack_values(out)


def _backward(attend: Attend, query, key, value, mask, scale, out_bar, sizes):
    operands, specs, queries, keys, dtype = _operands(query, key, value, mask, scale, sizes, 7)
    layout = queries.layout
    scales, scale_specs = operands[-1], specs[-1]
    *bars, scale_bar = call(
        functools.partial(_backward_kernel, attend, queries, keys, dtype),
        (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3]), scales),
        name="fused_attention_backward",
        grid=queries.grid,
        in_specs=(*specs, queries.per_token(layout.value_lanes)),
        out_specs=(*specs[:3], scale_specs),
        sequential=0,
        flops=queries.flops(10) + keys.flops(12),
    )(*operands, layout.pack_values(out_bar))
    query_bar, key_bar, value_bar = bars
    tokens_bar = (
        layout.unpack_keys(query_bar),
        layout.unpack_keys(key_bar),
        layout.unpack_values(value_bar),
    )
    return tokens_bar, [jnp.sum(layout.unpack_rows(x, values=False), axis=-1) for x in scale_bar]


def _operands(query, key, value, mask, scale, sizes: BlockSizes, arrays: int):
    """What both kernels read, its specs, the tilings of queries and keys, the matmul dtype."""
    batch, _, heads, dim = query.shape
    layout = HeadLayout(heads, dim, value.shape[-1])
    dtype = jnp.result_type(query, key, value)
    # The longer a sequence, the fewer heads fit.
    longest = max(query.shape[1], key.shape[1]) * arrays * dtype.itemsize
    step_groups = groups_per_step(layout, min(sizes.fused_bytes // longest, sizes.fused_lanes))
    queries, keys = (Tiling.whole(layout, batch, x.shape[1], step_groups) for x in (query, key))
    masks = ()
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0), (0, keys.tokens - keys.length), (0, 0)])
        masks = (layout.pack_mask(mask),)
    scales = ()
    if scale is not None:
        scales = (layout.spread_rows(scale, values=False),)
    operands = (
        layout.pack_keys(query),
        layout.pack_keys(key),
        layout.pack_values(value),
        masks,
        scales,
    )
    specs = (
        queries.per_token(layout.lanes),
        keys.per_token(layout.lanes),
        keys.per_token(layout.value_lanes),
        tuple(keys.mask(x) for x in masks),
        tuple(keys.per_group(1, layout.lanes) for _ in scales),
    )
    return operands, specs, queries, keys, dtype


def _group(attend: Attend, queries: Tiling, keys: Tiling, dtype, group: int, refs):
    """One group's attention as a function of query, key, value and scale, and these."""
    query_ref, key_ref, value_ref, masks, scales = refs
    layout = queries.layout
    widths = (layout.lanes, layout.value_lanes)
    valid = [keys.valid(group, lanes, mask_rows(masks, group)) for lanes in widths]
    counts = [
        float(keys.length) if v is None or not masks else jnp.sum(_ones(v), axis=0, keepdims=True)
        for v in valid
    ]
    inputs = (
        load(query_ref, group, layout.lanes, queries.valid(group, layout.lanes)),
        load(key_ref, group, layout.lanes, valid[0]),
        load(value_ref, group, layout.value_lanes, valid[1]),
        scales[0][0, group] if scales else None,
    )
    return functools.partial(attend, layout, dtype, valid=valid, counts=counts), inputs, valid


def _ones(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.float32)


def _forward_kernel(attend: Attend, queries: Tiling, keys: Tiling, dtype, *refs):
    *refs, out_ref = refs
    for group in range(queries.step_groups):
        run, inputs, _ = _group(attend, queries, keys, dtype, group, refs)
        store(out_ref, group, queries.layout.value_lanes, run(*inputs))


def _backward_kernel(attend: Attend, queries: Tiling, keys: Tiling, dtype, *refs):
    *refs, out_bar_ref, query_bar_ref, key_bar_ref, value_bar_ref, scale_bar_refs = refs
    layout = queries.layout
    for group in range(queries.step_groups):
        run, inputs, valid = _group(attend, queries, keys, dtype, group, refs)
        out_valid = queries.valid(group, layout.value_lanes)
        out_bar = load(out_bar_ref, group, layout.value_lanes, out_valid)
        _, pull = jax.vjp(run, *inputs)
        query_bar, key_bar, value_bar, scale_bar = pull(out_bar)
        store(query_bar_ref, group, layout.lanes, query_bar)
        store(key_bar_ref, group, layout.lanes, keep(key_bar, valid[0]))
        store(value_bar_ref, group, layout.value_lanes, keep(value_bar, valid[1]))
        for ref in scale_bar_refs:
            ref[0, group] = scale_bar
