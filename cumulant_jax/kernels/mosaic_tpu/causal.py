"""The causal pass: chunk after chunk, with the moments so far carried in VMEM.

The backward pass goes from the last token block to the first. It needs the moments before every
chunk: the forward pass saves them once per block, and the rest are summed again from the keys and
values that are there anyway. With 64 dims and order 3 a saved state is 128 KiB for two heads; saved
at every chunk of 128 tokens it would double the traffic of the pass, at every 1,024 it adds an
eighth, and memory stays linear with a small factor.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_tpu import body
from cumulant_jax.kernels.mosaic_tpu.body import Moments
from cumulant_jax.kernels.mosaic_tpu.causal_kernels import backward_kernel, forward_kernel
from cumulant_jax.kernels.mosaic_tpu.causal_plan import (
    Rule,
    make_plan,
    pack_sums,
    query_lanes,
    saved_shapes,
    saved_specs,
    scratch,
    token_operands,
    unpack_sums,
)
from cumulant_jax.kernels.mosaic_tpu.chunk import Cumulant, Linear
from cumulant_jax.kernels.mosaic_tpu.moments import token_count
from cumulant_jax.kernels.mosaic_tpu.tiling import DEFAULT_SIZES, VMEM_BYTES, BlockSizes, call


def causal_cumulant(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    sums: jax.Array,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    scale: jax.Array,
    *,
    reduction_is_sum: bool,
    save_states: bool = False,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, Moments | None]:
    """Causal cumulant attention.

    Args:
      features: the monomials, diagonal, of order 2 to 4.
      query: [batch, tokens, heads, dim]; heads in equal groups share a key head.
      key: [batch, tokens, key_heads, dim].
      value: [batch, tokens, key_heads, value_dim].
      mask: None or bool [batch, tokens, key_heads or 1].
      sums: float32 [batch, key_heads, features, value_dim + 1], moments of the tokens before.
      key_pivot: float32 [batch, key_heads, dim], what those keys were measured from.
      value_pivot: float32 [batch, key_heads, value_dim].
      scale: float32 [batch, key_heads], factor on the queries.
      reduction_is_sum: multiply by the number of tokens, the paper's literal form.
      save_states: whether to return what the backward pass needs.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      The output [batch, tokens, heads, value_dim] in the dtype of value, the sums after the last
      token, and the moments before each token block if asked for.
    """
    rule = Cumulant(body.known_features(features), reduction_is_sum)
    state = sums, key_pivot, value_pivot, scale
    return _forward(rule, query, key, value, mask, state, save_states, block_sizes)


def causal_cumulant_backward(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    sums: jax.Array,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    scale: jax.Array,
    states: Moments,
    out_bar: jax.Array,
    sums_bar: jax.Array,
    *,
    reduction_is_sum: bool,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key, value, sums and scale of `causal_cumulant`.

    The count of tokens in `sums` is a constant: its cotangent is 0.

    Args:
      features: as for `causal_cumulant`, and so on.
      query: [batch, tokens, heads, dim].
      key: [batch, tokens, key_heads, dim].
      value: [batch, tokens, key_heads, value_dim].
      mask: None or bool [batch, tokens, key_heads or 1].
      sums: the sums before the first token.
      key_pivot: float32 [batch, key_heads, dim].
      value_pivot: float32 [batch, key_heads, value_dim].
      scale: float32 [batch, key_heads].
      states: what the forward pass saved.
      out_bar: [batch, tokens, heads, value_dim].
      sums_bar: cotangent of the sums after the last token.
      reduction_is_sum: as in the forward pass.
      block_sizes: as in the forward pass.
    """
    rule = Cumulant(body.known_features(features), reduction_is_sum)
    state = sums, key_pivot, value_pivot, scale
    return _backward(rule, query, key, value, mask, state, states, out_bar, sums_bar, block_sizes)


def causal_linear(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    sums: jax.Array,
    *,
    normalizer_eps: float,
    save_states: bool = False,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, Moments | None]:
    """Causal linear attention.

    Args:
      features: elu1, relu or exp.
      query: [batch, tokens, heads, dim], already scaled.
      key: [batch, tokens, key_heads, dim].
      value: [batch, tokens, key_heads, value_dim].
      mask: None or bool [batch, tokens, key_heads or 1].
      sums: float32 [batch, key_heads, dim, value_dim + 1].
      normalizer_eps: added to the denominator.
      save_states: whether to return what the backward pass needs.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      As `causal_cumulant`.
    """
    rule = Linear(body.known_features(features), normalizer_eps)
    state = _pivotless(sums, key)
    return _forward(rule, query, key, value, mask, state, save_states, block_sizes)


def causal_linear_backward(
    features: Features,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    sums: jax.Array,
    states: Moments,
    out_bar: jax.Array,
    sums_bar: jax.Array,
    *,
    normalizer_eps: float,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key, value and sums of `causal_linear`.

    Args:
      features: as for `causal_linear`, and so on.
      query: [batch, tokens, heads, dim].
      key: [batch, tokens, key_heads, dim].
      value: [batch, tokens, key_heads, value_dim].
      mask: None or bool [batch, tokens, key_heads or 1].
      sums: the sums before the first token.
      states: what the forward pass saved.
      out_bar: [batch, tokens, heads, value_dim].
      sums_bar: cotangent of the sums after the last token.
      normalizer_eps: added to the denominator.
      block_sizes: as in the forward pass.
    """
    rule = Linear(body.known_features(features), normalizer_eps)
    state = _pivotless(sums, key)
    bars = _backward(rule, query, key, value, mask, state, states, out_bar, sums_bar, block_sizes)
    return bars[:4]


def _pivotless(sums: jax.Array, key: jax.Array):
    batch, _, heads, dim = key.shape
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    value_dim = sums.shape[-1] - 1
    return sums, zeros((batch, heads, dim)), zeros((batch, heads, value_dim)), zeros((batch, heads))


def _forward(rule: Rule, query, key, value, mask, state, save_states: bool, sizes):
    plan = make_plan(rule, query, key, value, sizes, reverse=False)
    layout, tiling = plan.layout, plan.tiling
    operands, specs, moments = token_operands(plan, query, key, value, mask, state)
    moment_specs = Moments(*(tiling.per_group(*shape) for shape in plan.moments))
    batch, length, heads, _ = query.shape
    out_shape = (batch, length, heads * layout.head_value_lanes)
    out, after, saved = call(
        functools.partial(forward_kernel, plan),
        (
            jax.ShapeDtypeStruct(out_shape, value.dtype),
            Moments(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moments)),
            (saved_shapes(plan),) if save_states else (),
        ),
        name="causal_attention",
        grid=tiling.grid,
        in_specs=(*specs, moment_specs),
        out_specs=(
            tiling.per_token(plan.queries * layout.value_lanes),
            moment_specs,
            (saved_specs(plan),) if save_states else (),
        ),
        sequential=1,
        scratch_shapes=(scratch(plan),),
        flops=plan.flops,
        vmem_bytes=VMEM_BYTES,
    )(*operands, moments)
    count = None
    if rule.features.constant:
        count = state[0][..., -1, -1] + token_count(key, mask)
    sums = unpack_sums(layout, after, count)
    out = out.reshape(*query.shape[:3], layout.head_value_lanes)[..., : layout.value_dim]
    return out, sums, saved[0] if save_states else None


def _backward(rule: Rule, query, key, value, mask, state, states, out_bar, sums_bar, sizes):
    plan = make_plan(rule, query, key, value, sizes, reverse=True)
    layout, tiling = plan.layout, plan.tiling
    operands, specs, _ = token_operands(plan, query, key, value, mask, state)
    moment_specs = Moments(*(tiling.per_group(*shape) for shape in plan.moments))
    after_bar = pack_sums(layout, sums_bar, constant=rule.features.constant)
    queries, keys, values, _, rows = operands
    likes = (queries, keys, values, after_bar, rows.scale)
    query_bar, key_bar, value_bar, before_bar, scale_bar = call(
        functools.partial(backward_kernel, plan),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), likes),
        name="causal_attention_backward",
        grid=tiling.grid,
        in_specs=(
            *specs,
            saved_specs(plan),
            tiling.per_token(plan.queries * layout.value_lanes),
            moment_specs,
        ),
        out_specs=(*specs[:3], moment_specs, specs[-1].scale),
        sequential=1,
        scratch_shapes=(scratch(plan), scratch(plan, tiling.tokens // plan.chunk)),
        flops=3 * plan.flops,
        vmem_bytes=VMEM_BYTES,
    )(*operands, states, query_lanes(out_bar, layout.head_value_lanes), after_bar)
    count = jnp.zeros(()) if rule.features.constant else None
    return (
        query_bar.reshape(*query.shape[:3], layout.head_lanes)[..., : layout.dim],
        layout.unpack_keys(key_bar),
        layout.unpack_values(value_bar),
        unpack_sums(layout, before_bar, count),
        jnp.sum(layout.unpack_rows(scale_bar, values=False), axis=-1),
    )
