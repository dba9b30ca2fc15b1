"""The two causal kernels: block after block of tokens, within a block chunk after chunk."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cumulant_jax.kernels.mosaic_tpu.body import Moments
from cumulant_jax.kernels.mosaic_tpu.causal_plan import Plan, Rows
from cumulant_jax.kernels.mosaic_tpu.chunk import Facts, Tokens, advance
from cumulant_jax.kernels.mosaic_tpu.layout import all_of, keep, spread


def forward_kernel(plan: Plan, query, key, value, masks, rows, before, out, after, saved, carry):
    """Attends and carries the moments on; keeps those before this block where asked to."""
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


def backward_kernel(
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
    """Finds the moments before each chunk again, then goes back through the chunks."""
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
    counted = functools.partial(_running_count, plan, group, start, index, masks=masks)
    if not plan.rule.features.zero_at_zero:
        valid = all_of(valid, layout.own_lanes(plan.chunk))
    return tokens, Facts(
        valid,
        rows.key_count[0, group] + counted(lanes=layout.lanes),
        rows.value_count[0, group] + counted(lanes=layout.value_lanes),
        rows.value_pivot[0, group],
    )


def _valid(plan: Plan, group: int, start, index, lanes: int, masks) -> jax.Array | None:
    rows = tuple(_mask_rows(masks[0], group, index) for _ in masks[:1])
    return plan.tiling.valid(group, lanes, rows, offset=start, tokens=plan.chunk)


def _running_count(plan: Plan, group: int, start, index, *, lanes: int, masks) -> jax.Array:
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
        keep(jnp.concatenate(heads[g :: plan.queries], axis=1), valid) for g in range(plan.queries)
    )


def _store_queries(plan: Plan, ref, group: int, start, arrays, head_lanes: int) -> None:
    """The inverse of `_load_queries`."""
    if plan.queries == 1:
        return _store(plan, ref, group, start, arrays[0])
    lanes = range(0, arrays[0].shape[1], head_lanes)
    heads = [x[:, i : i + head_lanes] for i in lanes for x in arrays]
    return _store(plan, ref, group, start, jnp.concatenate(heads, axis=1))
