"""Token statistics attention: energies, then second moments, then the output, in one kernel.

A sequence that fits one block is done in one step: read once, written once, and the backward pass
is the derivative of that step. For longer ones three phases are an axis of the grid, and the tokens
are read once per phase.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels.mosaic_tpu.body import dot, reciprocal
from cumulant_jax.kernels.mosaic_tpu.layout import LANES
from cumulant_jax.kernels.mosaic_tpu.memberships import (
    MEMBERSHIP_EPS,
    keep_tokens,
    lanes_of_heads,
    memberships,
    per_head_row,
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

_ENERGY_FLOOR = 1e-24


class Statistics(NamedTuple):
    """Sums over the tokens: rows [1, heads · dim], and [1, 128] for the membership.

    Attributes:
      energy: Σ w².
      weighted: Σ Π w².
      membership: Σ Π.
    """

    energy: Any
    weighted: Any
    membership: Any


def token_statistics(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    *,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, Statistics]:
    """Token statistics attention.

    Args:
      w: [batch, tokens, heads, dim].
      temperature: [heads].
      mask: None or bool [batch, tokens].
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      The output [batch, tokens, heads, dim] in the dtype of w, and the sums that the backward pass
      starts from.
    """
    plan, operands, specs = _operands(w, temperature, mask, block_sizes)
    tokens = operands[0]
    shapes = [jax.ShapeDtypeStruct((w.shape[0], *shape), jnp.float32) for shape in plan.statistics]
    out, statistics = call(
        functools.partial(_whole_forward_kernel if plan.blocks == 1 else _forward_kernel, plan),
        (jax.ShapeDtypeStruct(tokens.shape, w.dtype), Statistics(*shapes)),
        name="token_statistics",
        grid=(w.shape[0], 1 if plan.blocks == 1 else 3, plan.blocks),
        in_specs=specs,
        out_specs=(plan.per_token(from_phase=2), plan.rows()),
        sequential=2,
        flops=4 * LANES * tokens.size,
        vmem_bytes=VMEM_BYTES,
    )(*operands)
    return out.reshape(w.shape), statistics


def token_statistics_backward(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    statistics: Statistics,
    out_bar: jax.Array,
    *,
    block_sizes: BlockSizes = DEFAULT_SIZES,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of w and temperature of `token_statistics`.

    Three phases again: the cotangent of the second moments, those of energy and temperature, that
    of the tokens.

    Args:
      w: [batch, tokens, heads, dim].
      temperature: [heads].
      mask: None or bool [batch, tokens].
      statistics: what the forward pass returned.
      out_bar: [batch, tokens, heads, dim].
      block_sizes: sizes of the blocks in VMEM.
    """
    plan, operands, specs = _operands(w, temperature, mask, block_sizes)
    tokens = operands[0]
    row = jax.ShapeDtypeStruct((w.shape[0], 1, LANES), jnp.float32)
    width = plan.heads * plan.dim
    w_bar, temperature_bar = call(
        functools.partial(_whole_backward_kernel if plan.blocks == 1 else _backward_kernel, plan),
        (jax.ShapeDtypeStruct(tokens.shape, w.dtype), row),
        name="token_statistics_backward",
        grid=(w.shape[0], 1 if plan.blocks == 1 else 3, plan.blocks),
        in_specs=(*specs, plan.per_token(), plan.rows()),
        out_specs=(plan.per_token(from_phase=2), pl.BlockSpec((1, 1, LANES), _first)),
        sequential=2,
        scratch_shapes=[pltpu.VMEM((1, width), jnp.float32) for _ in range(2)],
        flops=12 * LANES * tokens.size,
        vmem_bytes=VMEM_BYTES,
    )(*operands, out_bar.reshape(tokens.shape), statistics)
    return w_bar.reshape(w.shape), jnp.sum(temperature_bar[:, 0, : plan.heads], axis=0)


def _first(b, *_):
    return (b, 0, 0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut into blocks of `tokens`."""

    heads: int
    dim: int
    length: int
    tokens: int
    dtype: jnp.dtype

    @property
    def blocks(self) -> int:
        """Token blocks."""
        return pl.cdiv(self.length, self.tokens)

    @property
    def statistics(self) -> Statistics:
        """The shapes of the sums of one batch row."""
        width = self.heads * self.dim
        return Statistics((1, width), (1, width), (1, LANES))

    def per_token(self, *, from_phase: int = 0) -> pl.BlockSpec:
        """Blocks of the tokens; before `from_phase` the first one only, which costs nothing."""
        sizes = (1, self.tokens, self.heads * self.dim)
        return pl.BlockSpec(sizes, self._index(from_phase))

    def _index(self, from_phase: int):
        if self.blocks == 1 or not from_phase:
            return lambda b, p, t: (b, t, 0)
        return lambda b, p, t: (b, jnp.where(p >= from_phase, t, 0), 0)

    def rows(self) -> Statistics:
        """The sums of one batch row."""
        return Statistics(*(pl.BlockSpec((1, *shape), _first) for shape in self.statistics))

    def valid(self, mask) -> jax.Array | None:
        """Where this block's tokens are valid, [tokens, 128]."""
        length = self.length if self.length % self.tokens else None
        row = mask[0][0] if mask else None
        return valid_tokens(self.tokens, pl.program_id(2) * self.tokens, length, row)


def tokens_per_block(length: int, width: int, elements: int, multiple: int) -> int:
    """Tokens that keep a block within `elements`, in blocks of even size."""
    most = max(elements // width // multiple, 1) * multiple
    blocks = pl.cdiv(length, most)
    return pl.cdiv(pl.cdiv(length, blocks), multiple) * multiple


def _operands(w, temperature, mask, sizes: BlockSizes):
    batch, length, heads, dim = w.shape
    width = heads * dim
    # A mask has its tokens along lanes, in whole registers where there are several blocks.
    tokens = tokens_per_block(length, width, sizes.statistics_elements, SUBLANES)
    if tokens < length:
        tokens = tokens_per_block(length, width, sizes.statistics_elements, LANES)
    plan = Plan(heads, dim, length, tokens, w.dtype)
    masks, mask_specs = (), ()
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0), (0, plan.blocks * tokens - length)])
        masks = (mask.astype(jnp.float32)[:, None],)
        mask_specs = (pl.BlockSpec((1, 1, tokens), lambda b, p, t: (b, 0, t)),)
    operands = w.reshape(batch, length, width), per_head_row(temperature)[None], masks
    specs = (
        plan.per_token(),
        pl.BlockSpec((1, LANES), lambda b, p, t: (0, 0)),
        mask_specs,
    )
    return plan, operands, specs


def _inverse_norm(energy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factor that normalises the tokens, and where it depends on the energy."""
    present = energy > _ENERGY_FLOOR
    inverse = jnp.where(present, lax.rsqrt(jnp.where(present, energy, 1.0)), _ENERGY_FLOOR**-0.5)
    return inverse, present


def _block(plan: Plan, valid, w, inverse, temperature, moment):
    """Output, Σ Π w² and Σ Π of a block of tokens."""
    members = lanes_of_heads(plan.heads, plan.dim)
    shares = sum_heads((w * inverse) ** 2, members, plan.dtype)
    pi = memberships(temperature * shares, plan.heads, valid)
    wide = to_heads(pi, members, plan.dtype)
    return (
        -w * wide * reciprocal(1 + moment),
        jnp.sum(wide * w * w, axis=0, keepdims=True),
        jnp.sum(pi, axis=0, keepdims=True),
    )


def _moment(plan: Plan, weighted: jax.Array, membership: jax.Array) -> jax.Array:
    """The second moments [1, heads · dim]."""
    members = lanes_of_heads(plan.heads, plan.dim)
    # Eight equal rows, since a product with one is not a matrix product.
    membership = jnp.broadcast_to(membership, (8, LANES))
    total = jnp.max(dot(membership, members, (1, 0), jnp.dtype(jnp.float32)), 0, keepdims=True)
    return weighted / (total + MEMBERSHIP_EPS)


def _whole(plan: Plan, valid, w, temperature):
    """Output and sums of all tokens at once."""
    energy = jnp.sum(w * w, axis=0, keepdims=True)
    members = lanes_of_heads(plan.heads, plan.dim)
    shares = sum_heads((w * _inverse_norm(energy)[0]) ** 2, members, plan.dtype)
    pi = memberships(temperature * shares, plan.heads, valid)
    weights = w * to_heads(pi, members, plan.dtype)
    sums = jnp.sum(weights * w, axis=0, keepdims=True), jnp.sum(pi, axis=0, keepdims=True)
    return -weights * reciprocal(1 + _moment(plan, *sums)), Statistics(energy, *sums)


def _whole_forward_kernel(plan: Plan, w_ref, temperature, mask, out, sums: Statistics):
    valid = plan.valid(mask)
    w = keep_tokens(w_ref[0].astype(jnp.float32), valid)
    result, parts = _whole(plan, valid, w, temperature[...])
    out[0] = result.astype(out.dtype)
    for ref, x in zip(sums, parts, strict=True):
        ref[0] = x


def _whole_backward_kernel(
    plan: Plan, w_ref, temperature, mask, out_bar_ref, sums, w_bar, temperature_bar, *scratch
):
    del sums, scratch
    valid = plan.valid(mask)
    w, out_bar = (keep_tokens(x[0].astype(jnp.float32), valid) for x in (w_ref, out_bar_ref))
    _, pull = jax.vjp(lambda *inputs: _whole(plan, valid, *inputs)[0], w, temperature[...])
    total, temperature_bar[0] = pull(out_bar)
    w_bar[0] = keep_tokens(total, valid).astype(w_bar.dtype)


def _forward_kernel(plan: Plan, w_ref, temperature, mask, out, sums: Statistics):
    phase = pl.program_id(1)
    valid = plan.valid(mask)
    w = keep_tokens(w_ref[0].astype(jnp.float32), valid)

    @pl.when((phase == 0) & (pl.program_id(2) == 0))
    def _():
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    @pl.when(phase == 0)
    def _():
        sums.energy[0] += jnp.sum(w * w, axis=0, keepdims=True)

    @pl.when(phase == 1)
    def _():
        inverse, _ = _inverse_norm(sums.energy[0])
        _, weighted, total = _block(plan, valid, w, inverse, temperature[...], 0.0)
        sums.weighted[0] += weighted
        sums.membership[0] += total

    @pl.when(phase == 2)
    def _():
        inverse, _ = _inverse_norm(sums.energy[0])
        moment = _moment(plan, sums.weighted[0], sums.membership[0])
        out[0] = _block(plan, valid, w, inverse, temperature[...], moment)[0].astype(out.dtype)


def _backward_kernel(
    plan: Plan,
    w_ref,
    temperature,
    mask,
    out_bar_ref,
    sums: Statistics,
    w_bar,
    temperature_bar,
    moment_bar,
    inverse_bar,
):
    phase = pl.program_id(1)
    valid = plan.valid(mask)
    w, out_bar = (keep_tokens(x[0].astype(jnp.float32), valid) for x in (w_ref, out_bar_ref))
    inverse, present = _inverse_norm(sums.energy[0])
    moment_of = functools.partial(_moment, plan)
    moment, pull_moment = jax.vjp(moment_of, sums.weighted[0], sums.membership[0])

    @pl.when((phase == 0) & (pl.program_id(2) == 0))
    def _():
        for ref in (temperature_bar, moment_bar, inverse_bar):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(phase == 0)
    def _():
        out, _, _ = _block(plan, valid, w, inverse, temperature[...], moment)
        moment_bar[...] -= jnp.sum(out_bar * out / (1 + moment), axis=0, keepdims=True)

    def pull():
        run = functools.partial(_block, plan, valid)
        _, pull = jax.vjp(run, w, inverse, temperature[...], moment)
        return pull((out_bar, *pull_moment(moment_bar[...])))

    @pl.when(phase == 1)
    def _():
        _, inverse_part, temperature_part, _ = pull()
        inverse_bar[...] += inverse_part
        temperature_bar[0] += temperature_part

    @pl.when(phase == 2)
    def _():
        # The energy is a sum over tokens: 1 / √energy depends on every one of them.
        of_norm = jnp.where(present, inverse * (inverse * (inverse * inverse_bar[...])), 0)
        total = pull()[0] - w * of_norm
        w_bar[0] = keep_tokens(total, valid).astype(w_bar.dtype)
