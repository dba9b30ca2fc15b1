"""Causal token statistics: running sums inside a chunk by a triangular product, carried between.

The state is 2 · dim + 1 numbers per head, so the forward pass can save it before every chunk (a
thirtieth of the chunk's tokens), and the backward pass recomputes nothing but the chunk itself.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels.mosaic_tpu.body import reciprocal
from cumulant_jax.kernels.mosaic_tpu.layout import LANES
from cumulant_jax.kernels.mosaic_tpu.memberships import (
    MEMBERSHIP_EPS,
    keep_tokens,
    lanes_of_heads,
    memberships,
    per_head_row,
    running_sum,
    sum_heads,
    to_heads,
    valid_tokens,
)
from cumulant_jax.kernels.mosaic_tpu.tiling import (
    DEFAULT_SIZES,
    SUBLANES,
    VMEM_BYTES,
    BlockSizes,
    call,
)
from cumulant_jax.kernels.mosaic_tpu.token_statistics import Statistics, tokens_per_block

_ENERGY_FLOOR = 1e-12


def causal_token_statistics(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    state: tuple[jax.Array, jax.Array, jax.Array],
    *,
    save_states: bool = False,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array], Statistics | None]:
    """Causal token statistics attention.

    Args:
      w: [batch, tokens, heads, dim].
      temperature: [heads].
      mask: None or bool [batch, tokens].
      bias: None or [heads, tokens], added to every dim's share of the running energy.
      state: energy [batch, heads, dim], weighted energy likewise, membership [batch, heads] of the
        tokens before; float32.
      save_states: whether to return what the backward pass needs.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      The output [batch, tokens, heads, dim] in the dtype of w, the state after the last token, and
      the states before each chunk if asked for.
    """
    plan, operands, specs = _operands(w, temperature, mask, bias, block_sizes, reverse=False)
    tokens, before = operands[0], _state_rows(state)
    out, after, saved = call(
        functools.partial(_forward_kernel, plan),
        (
            jax.ShapeDtypeStruct(tokens.shape, w.dtype),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), before),
            (plan.saved_shapes(w.shape[0]),) if save_states else (),
        ),
        name="causal_token_statistics",
        grid=(w.shape[0], plan.blocks),
        in_specs=(*specs, plan.rows()),
        out_specs=(plan.per_token(), plan.rows(), (plan.saved_specs(),) if save_states else ()),
        sequential=1,
        scratch_shapes=(plan.scratch(),),
        flops=(4 * LANES + 8 * plan.chunk) * tokens.size,
        vmem_bytes=VMEM_BYTES,
    )(*operands, before)
    after = _state_arrays(after, w)
    return out.reshape(w.shape), after, saved[0] if save_states else None


def causal_token_statistics_backward(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    states: Statistics,
    out_bar: jax.Array,
    state_bar: tuple[jax.Array, jax.Array, jax.Array],
    *,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[jax.Array, jax.Array, jax.Array]]:
    """The cotangents of w, temperature, bias (None without one) and the state before.

    Args:
      w: [batch, tokens, heads, dim].
      temperature: [heads].
      mask: None or bool [batch, tokens].
      bias: None or [heads, tokens].
      states: what the forward pass saved.
      out_bar: [batch, tokens, heads, dim].
      state_bar: cotangents of the state after the last token.
      block_sizes: as in the forward pass.
    """
    plan, operands, specs = _operands(w, temperature, mask, bias, block_sizes, reverse=True)
    tokens, after_bar = operands[0], _state_rows(state_bar)
    batch, length, heads, _ = w.shape
    bias_bars, bias_specs = (), ()
    if bias is not None:
        bias_bars = (jax.ShapeDtypeStruct((batch, length, LANES), jnp.float32),)
        bias_specs = (plan.per_token(LANES),)
    w_bar, temperature_bar, bias_bars, before_bar = call(
        functools.partial(_backward_kernel, plan),
        (
            jax.ShapeDtypeStruct(tokens.shape, w.dtype),
            jax.ShapeDtypeStruct((batch, 1, LANES), jnp.float32),
            bias_bars,
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), after_bar),
        ),
        name="causal_token_statistics_backward",
        grid=(batch, plan.blocks),
        in_specs=(*specs, plan.saved_specs(), plan.per_token(), plan.rows()),
        out_specs=(
            plan.per_token(),
            pl.BlockSpec((1, 1, LANES), lambda b, t: (b, 0, 0)),
            bias_specs,
            plan.rows(),
        ),
        sequential=1,
        scratch_shapes=(plan.scratch(),),
        flops=3 * (4 * LANES + 8 * plan.chunk) * tokens.size,
        vmem_bytes=VMEM_BYTES,
    )(*operands, states, out_bar.reshape(tokens.shape), after_bar)
    bias_bar = None
    if bias is not None:
        bias_bar = jnp.sum(bias_bars[0], axis=0)[:, :heads].T
    temperature_bar = jnp.sum(temperature_bar[:, 0, :heads], axis=0)
    return w_bar.reshape(w.shape), temperature_bar, bias_bar, _state_arrays(before_bar, w)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut into blocks of `tokens`, and these into chunks."""

    heads: int
    dim: int
    length: int
    tokens: int
    chunk: int
    dtype: jnp.dtype
    reverse: bool

    @property
    def width(self) -> int:
        """Lanes of a token."""
        return self.heads * self.dim

    @property
    def blocks(self) -> int:
        """Token blocks."""
        return pl.cdiv(self.length, self.tokens)

    @property
    def chunks(self) -> int:
        """Chunks of a block."""
        return self.tokens // self.chunk

    @property
    def state(self) -> Statistics:
        """The shapes of the state."""
        return Statistics((1, self.width), (1, self.width), (1, LANES))

    def block(self, step):
        """Which token block a step sees."""
        return self.blocks - 1 - step if self.reverse else step

    def per_token(self, lanes: int = 0) -> pl.BlockSpec:
        """Blocks of [batch, tokens, lanes]."""
        sizes = (1, self.tokens, lanes or self.width)
        return pl.BlockSpec(sizes, lambda b, t: (b, self.block(t), 0))

    def rows(self) -> Statistics:
        """The state of one batch row."""
        return Statistics(
            *(pl.BlockSpec((1, *shape), lambda b, t: (b, 0, 0)) for shape in self.state)
        )

    def scratch(self) -> Statistics:
        """The carried state, in VMEM."""
        return Statistics(*(pltpu.VMEM(shape, jnp.float32) for shape in self.state))

    def saved_shapes(self, batch: int) -> Statistics:
        """The states before each chunk."""
        sizes = (batch, self.blocks * self.chunks)
        return Statistics(
            *(jax.ShapeDtypeStruct((*sizes, *shape), jnp.float32) for shape in self.state)
        )

    def saved_specs(self) -> Statistics:
        """Those of one block."""
        return Statistics(
            *(
                pl.BlockSpec((1, self.chunks, *shape), lambda b, t: (b, self.block(t), 0, 0))
                for shape in self.state
            )
        )


def _operands(w, temperature, mask, bias, sizes: BlockSizes, *, reverse: bool):
    batch, length, heads, dim = w.shape
    width = heads * dim
    chunk = min(sizes.chunk, pl.cdiv(length, SUBLANES) * SUBLANES)
    tokens = tokens_per_block(length, width, 2 * sizes.statistics_elements, chunk)
    plan = Plan(heads, dim, length, tokens, chunk, w.dtype, reverse)
    masks, mask_specs, biases, bias_specs = (), (), (), ()
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0), (0, plan.blocks * tokens - length)])
        rows = mask.astype(jnp.float32).reshape(batch, plan.blocks * plan.chunks, 1, chunk)
        masks = (rows,)
        mask_specs = (
            pl.BlockSpec((1, plan.chunks, 1, chunk), lambda b, t: (b, plan.block(t), 0, 0)),
        )
    if bias is not None:
        biases = (per_head_row(bias.T),)
        bias_specs = (pl.BlockSpec((tokens, LANES), lambda b, t: (plan.block(t), 0)),)
    operands = w.reshape(batch, length, width), per_head_row(temperature)[None], masks, biases
    specs = plan.per_token(), pl.BlockSpec((1, LANES), lambda b, t: (0, 0)), mask_specs, bias_specs
    return plan, operands, specs


def _state_rows(state) -> Statistics:
    energy, weighted, membership = (x.astype(jnp.float32) for x in state)
    batch = energy.shape[0]
    return Statistics(
        energy.reshape(batch, 1, -1),
        weighted.reshape(batch, 1, -1),
        per_head_row(membership)[:, None],
    )


def _state_arrays(rows: Statistics, w: jax.Array):
    batch, _, heads, dim = w.shape
    energy, weighted = (x.reshape(batch, heads, dim) for x in (rows.energy, rows.weighted))
    return energy, weighted, rows.membership[:, 0, :heads]


def _chunk(plan: Plan, valid, state: Statistics, w, temperature, bias):
    """The output of a chunk [tokens, width] and the state after it."""
    members = lanes_of_heads(plan.heads, plan.dim)
    squares = w * w
    energy = state.energy + running_sum(squares, plan.dtype)
    present = energy > _ENERGY_FLOOR
    # Beyond the floor a share may not depend on the energy; at it, it is linear in the squares.
    inverse = jnp.where(present, reciprocal(jnp.where(present, energy, 1.0)), 1 / _ENERGY_FLOOR)
    shares = sum_heads(squares * inverse, members, plan.dtype)
    if bias is not None:
        shares = shares + plan.dim * bias
    pi = memberships(temperature * shares, plan.heads, valid)
    wide = to_heads(pi, members, plan.dtype)
    weighted_squares = wide * squares
    weighted = state.weighted + running_sum(weighted_squares, plan.dtype)
    total = state.membership + running_sum(pi, plan.dtype)
    # 1 / (1 + m) with m = weighted / total: one division.
    total_wide = to_heads(total, members, jnp.dtype(jnp.float32)) + MEMBERSHIP_EPS
    out = -w * wide * total_wide * reciprocal(total_wide + weighted)
    after = Statistics(
        state.energy + jnp.sum(squares, axis=0, keepdims=True),
        state.weighted + jnp.sum(weighted_squares, axis=0, keepdims=True),
        state.membership + jnp.sum(pi, axis=0, keepdims=True),
    )
    return out, after


def _valid(plan: Plan, index, masks) -> jax.Array | None:
    start = plan.block(pl.program_id(1)) * plan.tokens + index * plan.chunk
    length = plan.length if plan.length % plan.tokens else None
    return valid_tokens(plan.chunk, start, length, masks[0][0, index] if masks else None)


def _rows(plan: Plan, index):
    return pl.ds(pl.multiple_of(index * plan.chunk, plan.chunk), plan.chunk)


def _inputs(plan: Plan, index, w_ref, biases):
    """Valid tokens, their bias, and where they are valid."""
    rows = _rows(plan, index)
    return w_ref[0, rows].astype(jnp.float32), biases[0][rows] if biases else None


def _forward_kernel(
    plan: Plan, w_ref, temperature, masks, biases, before, out, after, saved, state
):
    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref, x in zip(state, before, strict=True):
            ref[...] = x[0]

    def step(index, carried):
        valid = _valid(plan, index, masks)
        w, bias = _inputs(plan, index, w_ref, biases)
        for states in saved:
            for ref, x in zip(states, state, strict=True):
                ref[0, index] = x[...]
        values = Statistics(*(ref[...] for ref in state))
        result, parts = _chunk(plan, valid, values, keep_tokens(w, valid), temperature[...], bias)
        out[0, _rows(plan, index)] = result.astype(out.dtype)
        for ref, x in zip(state, parts, strict=True):
            ref[...] = x
        return carried

    lax.fori_loop(0, plan.chunks, step, 0)

    @pl.when(pl.program_id(1) == plan.blocks - 1)
    def _():
        for ref, x in zip(after, state, strict=True):
            ref[0] = x[...]


def _backward_kernel(
    plan: Plan,
    w_ref,
    temperature,
    masks,
    biases,
    saved: Statistics,
    out_bar_ref,
    after_bar: Statistics,
    w_bar,
    temperature_bar,
    bias_bars,
    before_bar: Statistics,
    state_bar: Statistics,
):
    @pl.when(pl.program_id(1) == 0)
    def _():
        temperature_bar[...] = jnp.zeros_like(temperature_bar)
        for ref, x in zip(state_bar, after_bar, strict=True):
            ref[...] = x[0]

    def step(reverse_index, carried):
        index = plan.chunks - 1 - reverse_index
        rows, valid = _rows(plan, index), _valid(plan, index, masks)
        w, bias = _inputs(plan, index, w_ref, biases)
        if bias is not None:
            bias = keep_tokens(bias, valid)
        out_bar = keep_tokens(out_bar_ref[0, rows].astype(jnp.float32), valid)
        state = Statistics(*(ref[0, index] for ref in saved))
        _, pull = jax.vjp(
            functools.partial(_chunk, plan, valid),
            state,
            keep_tokens(w, valid),
            temperature[...],
            bias,
        )
        bars = pull((out_bar, Statistics(*(ref[...] for ref in state_bar))))
        parts, total, temperature_part, bias_part = bars
        for ref, x in zip(state_bar, parts, strict=True):
            ref[...] = x
        temperature_bar[0] += temperature_part
        w_bar[0, rows] = keep_tokens(total, valid).astype(w_bar.dtype)
        for ref in bias_bars:
            ref[0, rows] = bias_part
        return carried

    lax.fori_loop(0, plan.chunks, step, 0)

    @pl.when(pl.program_id(1) == plan.blocks - 1)
    def _():
        for ref, x in zip(before_bar, state_bar, strict=True):
            ref[0] = x[...]
