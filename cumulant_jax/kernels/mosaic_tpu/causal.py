"""The causal pass: chunk after chunk, with the moments so far carried in VMEM.

The backward pass goes from the last token block to the first. It needs the moments before every
chunk: the forward pass saves them once per block, and the rest are summed again from the keys and
values that are there anyway. With 64 dims and order 3 a saved state is 128 KiB for two heads; saved
at every chunk of 128 tokens it would double the traffic of the pass, at every 1,024 it adds an
eighth, and memory stays linear with a small factor.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_tpu import body
from cumulant_jax.kernels.mosaic_tpu.body import Moments
from cumulant_jax.kernels.mosaic_tpu.chunk import Cumulant, Facts, Linear, Tokens, advance
from cumulant_jax.kernels.mosaic_tpu.layout import LANES, HeadLayout, all_of, keep, spread
from cumulant_jax.kernels.mosaic_tpu.moments import join_sums, split_sums
from cumulant_jax.kernels.mosaic_tpu.tiling import (
    SUBLANES,
    BlockSizes,
    Tiling,
    call,
    groups_per_step,
)

Rule = Cumulant | Linear


class Rows(NamedTuple):
    """What is one number per lane of a group: [batch, groups, 1, lanes or value_lanes].

    Attributes:
      key_pivot: what keys are measured from.
      value_pivot: what values are measured from.
      key_count: number of tokens before the first, in key lanes.
      value_count: the same in value lanes.
      scale: factor on the queries.
    """

    key_pivot: jax.Array
    value_pivot: jax.Array
    key_count: jax.Array
    value_count: jax.Array
    scale: jax.Array


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
    block_sizes: BlockSizes = BlockSizes(),
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
    block_sizes: BlockSizes = BlockSizes(),
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
    return _backward(
        rule, query, key, value, mask, state, states, out_bar, sums_bar, block_sizes
    )


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
    block_sizes: BlockSizes = BlockSizes(),
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
    block_sizes: BlockSizes = BlockSizes(),
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is carried out.

    Attributes:
      rule: what is computed.
      tiling: of the keys and values.
      chunk: tokens per chunk, a divisor of the block.
      queries: query heads per key head.
      dtype: what goes into the matrix unit.
    """

    rule: Rule
    tiling: Tiling
    chunk: int
    queries: int
    dtype: jnp.dtype

    @property
    def layout(self) -> HeadLayout:
        """Of the keys and values."""
        return self.tiling.layout

    @property
    def moments(self) -> Moments:
        """The shapes of one group's moments."""
        layout, degree = self.layout, self.rule.features.degree
        return Moments(
            (layout.value_lanes, degree * layout.lanes),
            (1, degree * layout.lanes),
            (1, layout.value_lanes),
        )

    @property
    def flops(self) -> int:
        """Of the forward pass, cross-head products included."""
        layout, degree = self.layout, self.rule.features.degree
        scores = self.queries * layout.packed * self.chunk
        dense = scores * (degree * layout.lanes + layout.value_lanes)
        dense += self.chunk * degree * layout.lanes
        carried = (self.queries + 1) * degree * layout.lanes * layout.value_lanes
        tokens = self.tiling.batch * self.tiling.length * layout.groups
        return 2 * tokens * (dense + carried)


def _plan(rule: Rule, query, key, value, sizes: BlockSizes, *, reverse: bool) -> Plan:
    batch, length, heads, dim = key.shape
    layout = HeadLayout(heads, dim, value.shape[-1])
    dtype = jnp.result_type(query, key, value)
    most = sizes.causal_tokens // (2 if dtype == jnp.float32 else 1)
    tokens = pl.cdiv(length, pl.cdiv(length, most))
    chunk = min(sizes.chunk, pl.cdiv(tokens, SUBLANES) * SUBLANES)
    tiling = Tiling(
        layout,
        batch,
        length,
        pl.cdiv(tokens, chunk) * chunk,
        groups_per_step(layout, sizes.causal_lanes),
        reverse=reverse,
    )
    return Plan(rule, tiling, chunk, query.shape[2] // heads, dtype)


def _operands(plan: Plan, query, key, value, mask, state):
    """The arrays that both kernels read, and their block specs."""
    layout, tiling = plan.layout, plan.tiling
    sums, key_pivot, value_pivot, scale = state
    constant = plan.rule.features.constant
    count = sums[..., -1, -1] if constant else jnp.zeros_like(scale)
    moments = _pack_sums(layout, sums, constant=constant)

    def lanes(x, dim, *, values):
        return layout.pack_rows(jnp.broadcast_to(x[..., None], (*x.shape, dim)), values=values)

    rows = Rows(
        layout.pack_rows(key_pivot, values=False),
        layout.pack_rows(value_pivot, values=True),
        lanes(count, layout.dim, values=False),
        lanes(count, layout.value_dim, values=True),
        lanes(scale, layout.dim, values=False),
    )
    masks = () if mask is None else _chunk_rows(plan, mask)
    operands = (
        _query_lanes(query, layout.head_lanes),
        layout.pack_keys(key),
        layout.pack_values(value),
        masks,
        rows,
    )
    specs = (
        tiling.per_token(plan.queries * layout.lanes),
        tiling.per_token(layout.lanes),
        tiling.per_token(layout.value_lanes),
        tuple(_mask_spec(plan, x) for x in masks),
        jax.tree.map(lambda x: tiling.per_group(*x.shape[2:]), rows),
    )
    return operands, specs, moments


def _forward(rule: Rule, query, key, value, mask, state, save_states: bool, sizes):
    plan = _plan(rule, query, key, value, sizes, reverse=False)
    layout, tiling = plan.layout, plan.tiling
    operands, specs, moments = _operands(plan, query, key, value, mask, state)
    moment_specs = Moments(*(tiling.per_group(*shape) for shape in plan.moments))
    out_shape = (*query.shape[:3], layout.head_value_lanes)
    out_shape = jax.ShapeDtypeStruct((*out_shape[:2], out_shape[2] * out_shape[3]), value.dtype)
    like = Moments(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in moments))
    saved = ()
    saved_specs = ()
    if save_states:
        saved = (_saved_shapes(plan),)
        saved_specs = (_saved_specs(plan),)
    out, after, saved = call(
        functools.partial(_forward_kernel, plan),
        (out_shape, like, saved),
        name="causal_attention",
        grid=tiling.grid,
        in_specs=(*specs, moment_specs),
        out_specs=(
            tiling.per_token(plan.queries * layout.value_lanes),
            moment_specs,
            saved_specs,
        ),
        sequential=1,
        scratch_shapes=(_scratch(plan),),
        flops=plan.flops,
    )(*operands, moments)
    count = None
    if rule.features.constant:
        count = state[0][..., -1, -1] + _count(key, mask)
    sums = _unpack_sums(layout, after, count)
    out = out.reshape(*query.shape[:3], layout.head_value_lanes)[..., : layout.value_dim]
    return out, sums, saved[0] if save_states else None


def _backward(rule: Rule, query, key, value, mask, state, states, out_bar, sums_bar, sizes):
    plan = _plan(rule, query, key, value, sizes, reverse=True)
    layout, tiling = plan.layout, plan.tiling
    operands, specs, _ = _operands(plan, query, key, value, mask, state)
    moment_specs = Moments(*(tiling.per_group(*shape) for shape in plan.moments))
    after_bar = _pack_sums(layout, sums_bar, constant=rule.features.constant)
    queries, keys, values, _, rows = operands
    likes = (queries, keys, values, after_bar, rows.scale)
    query_bar, key_bar, value_bar, before_bar, scale_bar = call(
        functools.partial(_backward_kernel, plan),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), likes),
        name="causal_attention_backward",
        grid=tiling.grid,
        in_specs=(
            *specs,
            _saved_specs(plan),
            tiling.per_token(plan.queries * layout.value_lanes),
            moment_specs,
        ),
        out_specs=(*specs[:3], moment_specs, specs[-1].scale),
        sequential=1,
        scratch_shapes=(_scratch(plan), _scratch(plan, tiling.tokens // plan.chunk)),
        flops=3 * plan.flops,
    )(*operands, states, _query_lanes(out_bar, layout.head_value_lanes), after_bar)
    count = jnp.zeros(()) if rule.features.constant else None
    return (
        query_bar.reshape(*query.shape[:3], layout.head_lanes)[..., : layout.dim],
        layout.unpack_keys(key_bar),
        layout.unpack_values(value_bar),
        _unpack_sums(layout, before_bar, count),
        jnp.sum(layout.unpack_rows(scale_bar, values=False), axis=-1),
    )


def _forward_kernel(plan: Plan, query, key, value, masks, rows, before, out, after, saved, carry):
    first = pl.program_id(3) == 0
    pl.when(first)(lambda: _copy(carry, before, 0))
    for states in saved:
        for ref, x in zip(states, carry, strict=True):
            ref[0, :, 0] = x[...]

    def step(index, carried):
        start = index * plan.chunk
        for group in range(plan.tiling.step_groups):
            tokens, facts = _chunk(plan, group, start, index, query, key, value, masks, rows)
            outs, moments = plan.rule(
                plan.layout,
                plan.dtype,
                facts,
                Moments(*(ref[group] for ref in carry)),
                tokens,
                rows.scale[0, group],
            )
            _store_queries(plan, out, group, start, outs, plan.layout.head_value_lanes)
            for ref, x in zip(carry, moments, strict=True):
                ref[group] = x
        return carried

    lax.fori_loop(0, _chunks(plan), step, 0)
    last = pl.program_id(3) == plan.tiling.blocks - 1
    pl.when(last)(lambda: _copy(after, carry, None))


def _backward_kernel(
    plan: Plan,
    query,
    key,
    value,
    masks,
    rows,
    saved,
    out_bar,
    after_bar,
    query_bar,
    key_bar,
    value_bar,
    before_bar,
    scale_bar,
    carry_bar,
    states,
):
    layout, groups = plan.layout, range(plan.tiling.step_groups)

    @pl.when(pl.program_id(3) == 0)
    def _():
        _copy(carry_bar, after_bar, 0)
        scale_bar[...] = jnp.zeros_like(scale_bar)

    for ref, x in zip(states, saved, strict=True):
        ref[0] = x[0, :, 0]
    chunks = _chunks(plan)

    def again(index, carried):
        for group in groups:
            start = index * plan.chunk
            tokens, facts = _chunk(plan, group, start, index, None, key, value, masks, rows)
            moments = advance(
                plan.rule.features,
                layout,
                plan.dtype,
                facts,
                Moments(*(ref[index, group] for ref in states)),
                tokens.key,
                tokens.value,
            )
            for ref, x in zip(states, moments, strict=True):
                ref[index + 1, group] = x
        return carried

    def step(reverse_index, carried):
        index = chunks - 1 - reverse_index
        start = index * plan.chunk
        for group in groups:
            tokens, facts = _chunk(plan, group, start, index, query, key, value, masks, rows)
            carry = Moments(*(ref[index, group] for ref in states))
            run = functools.partial(plan.rule, layout, plan.dtype, facts)
            _, pull = jax.vjp(run, carry, tokens, rows.scale[0, group])
            outs_bar = _load_queries(
                plan, out_bar, group, start, layout.value_lanes, layout.head_value_lanes
            )
            bars = pull((outs_bar, Moments(*(ref[group] for ref in carry_bar))))
            moments_bar, tokens_bar, part = bars
            for ref, x in zip(carry_bar, moments_bar, strict=True):
                ref[group] = x
            scale_bar[0, group] += part
            _store_queries(plan, query_bar, group, start, tokens_bar.queries, layout.head_lanes)
            for ref, x, lanes in (
                (key_bar, tokens_bar.key, layout.lanes),
                (value_bar, tokens_bar.value, layout.value_lanes),
            ):
                x = keep(x, _valid(plan, group, start, index, lanes, masks))
                _store(plan, ref, group, start, x)
        return carried

    lax.fori_loop(0, chunks - 1, again, 0)
    lax.fori_loop(0, chunks, step, 0)
    last = pl.program_id(3) == plan.tiling.blocks - 1
    pl.when(last)(lambda: _copy(before_bar, carry_bar, None))


def _copy(to: Moments, source: Moments, batch: int | None) -> None:
    """Between scratch and the block of an operand (`batch` 0) or of an output (None)."""
    for ref, x in zip(to, source, strict=True):
        if batch is None:
            ref[0] = x[...]
        else:
            ref[...] = x[batch]


def _chunks(plan: Plan):
    """The chunks of this block that hold a token."""
    tiling = plan.tiling
    if tiling.length % tiling.tokens == 0:
        return tiling.tokens // plan.chunk
    start = tiling.block(0, pl.program_id(3)) * tiling.tokens
    left = lax.div(tiling.length - start + plan.chunk - 1, plan.chunk)
    return jnp.minimum(left, tiling.tokens // plan.chunk)


def _chunk(plan: Plan, group: int, start, index, query, key, value, masks, rows: Rows):
    """One chunk of one group: its tokens, without queries where `query` is None, and facts."""
    layout = plan.layout
    valid = _valid(plan, group, start, index, layout.lanes, masks)
    value_valid = _valid(plan, group, start, index, layout.value_lanes, masks)
    queries = ()
    if query is not None:
        queries = _load_queries(plan, query, group, start, layout.lanes, layout.head_lanes)
    tokens = Tokens(
        queries,
        keep(_load(plan, key, group, start, layout.lanes) - rows.key_pivot[0, group], valid),
        keep(
            _load(plan, value, group, start, layout.value_lanes) - rows.value_pivot[0, group],
            value_valid,
        ),
    )
    counts = [
        before[0, group] + _running_count(plan, group, start, index, lanes, masks)
        for before, lanes in (
            (rows.key_count, layout.lanes),
            (rows.value_count, layout.value_lanes),
        )
    ]
    if not plan.rule.features.zero_at_zero:
        valid = all_of(valid, layout.own_lanes(plan.chunk))
    return tokens, Facts(valid, *counts, rows.value_pivot[0, group])


def _valid(plan: Plan, group: int, start, index, lanes: int, masks) -> jax.Array | None:
    rows = tuple(_mask_rows(masks[0], group, index) for _ in masks[:1])
    return plan.tiling.valid(group, lanes, rows, offset=start, tokens=plan.chunk)


def _running_count(plan: Plan, group: int, start, index, lanes: int, masks) -> jax.Array:
    """How many of this call's tokens there are up to each one, [chunk, lanes]."""
    if masks:
        return spread(_mask_rows(masks[1], group, index), lanes)
    tiling = plan.tiling
    position = lax.broadcasted_iota(jnp.int32, (plan.chunk, lanes), 0) + start
    position = position + tiling.block(0, pl.program_id(3)) * tiling.tokens
    return jnp.minimum(position + 1, tiling.length).astype(jnp.float32)


def _mask_rows(ref, group: int, index) -> jax.Array:
    return ref[0, min(group, ref.shape[1] - 1), index]


def _load(plan: Plan, ref, group: int, start, lanes: int) -> jax.Array:
    rows = pl.ds(pl.multiple_of(start, plan.chunk), plan.chunk)
    return ref[0, rows, group * lanes : (group + 1) * lanes].astype(jnp.float32)


def _store(plan: Plan, ref, group: int, start, x: jax.Array) -> None:
    rows = pl.ds(pl.multiple_of(start, plan.chunk), plan.chunk)
    lanes = x.shape[1]
    ref[0, rows, group * lanes : (group + 1) * lanes] = x.astype(ref.dtype)


def _load_queries(plan: Plan, ref, group: int, start, lanes: int, head_lanes: int):
    """For each query head of a key head, the lanes of the group's heads side by side."""
    x = _load(plan, ref, group, start, plan.queries * lanes)
    valid = plan.tiling.valid(group, lanes, offset=start, tokens=plan.chunk)
    if plan.queries == 1:
        return (keep(x, valid),)
    heads = [x[:, i : i + head_lanes] for i in range(0, x.shape[1], head_lanes)]
    return tuple(
        keep(jnp.concatenate(heads[g :: plan.queries], axis=1), valid)
        for g in range(plan.queries)
    )


def _store_queries(plan: Plan, ref, group: int, start, arrays, head_lanes: int) -> None:
    """The inverse of `_load_queries`."""
    if plan.queries == 1:
        return _store(plan, ref, group, start, arrays[0])
    lanes = range(0, arrays[0].shape[1], head_lanes)
    heads = [x[:, i : i + head_lanes] for i in lanes for x in arrays]
    return _store(plan, ref, group, start, jnp.concatenate(heads, axis=1))


def _query_lanes(x: jax.Array, lanes: int) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, lanes - x.shape[-1])])
    return x.reshape(*x.shape[:2], x.shape[2] * lanes)


def _chunk_rows(plan: Plan, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mask and running count as rows [batch, groups or 1, chunks, heads, tokens of a chunk]."""
    layout, tiling = plan.layout, plan.tiling
    spare = tiling.blocks * tiling.tokens - tiling.length
    mask = jnp.pad(mask, [(0, 0), (0, spare), (0, 0)])
    count = jnp.cumsum(mask.astype(jnp.float32), axis=1)

    def split(x):
        x = layout.pack_mask(x)
        return jnp.swapaxes(x.reshape(*x.shape[:3], -1, plan.chunk), 2, 3)

    return split(mask), split(count)


def _mask_spec(plan: Plan, rows: jax.Array) -> pl.BlockSpec:
    tiling = plan.tiling
    groups, _, heads, chunk = rows.shape[1:]
    shared = groups == 1 and heads == 1
    sizes = (1, 1 if shared else tiling.step_groups, tiling.tokens // chunk, heads, chunk)
    return pl.BlockSpec(
        sizes, lambda b, c, s, t: (b, 0 if shared else c, tiling.block(s, t), 0, 0)
    )


def _saved_shapes(plan: Plan) -> Moments:
    sizes = (plan.tiling.batch, plan.layout.groups, plan.tiling.blocks)
    return Moments(
        *(jax.ShapeDtypeStruct((*sizes, *shape), jnp.float32) for shape in plan.moments)
    )


def _saved_specs(plan: Plan) -> Moments:
    tiling = plan.tiling
    return Moments(
        *(
            pl.BlockSpec(
                (1, tiling.step_groups, 1, *shape),
                lambda b, c, s, t: (b, c, tiling.block(s, t), 0, 0),
            )
            for shape in plan.moments
        )
    )


def _scratch(plan: Plan, *leading: int) -> Moments:
    sizes = (*leading, plan.tiling.step_groups)
    return Moments(*(pltpu.VMEM((*sizes, *shape), jnp.float32) for shape in plan.moments))


def _pack_sums(layout: HeadLayout, sums: jax.Array, *, constant: bool) -> Moments:
    matrix, features, values = split_sums(sums, constant=constant)
    return Moments(
        layout.pack_matrix(matrix),
        layout.pack_rows(features, values=False),
        layout.pack_rows(values, values=True),
    )


def _unpack_sums(layout: HeadLayout, moments: Moments, count: jax.Array | None) -> jax.Array:
    values = layout.unpack_rows(moments.values, values=True)
    return join_sums(
        layout.unpack_matrix(moments.matrix),
        layout.unpack_rows(moments.features, values=False),
        None if count is None else values,
        jnp.zeros(()) if count is None else count,
    )


def _count(key: jax.Array, mask: jax.Array | None) -> jax.Array | float:
    return key.shape[1] if mask is None else jnp.sum(mask, axis=1, dtype=jnp.float32)
