"""How a causal call is cut into blocks, and the arrays that its kernels read and write."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels.mosaic_tpu.body import Moments
from cumulant_jax.kernels.mosaic_tpu.chunk import Cumulant, Linear
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout
from cumulant_jax.kernels.mosaic_tpu.moments import join_sums, split_sums
from cumulant_jax.kernels.mosaic_tpu.tiling import SUBLANES, BlockSizes, Tiling, groups_per_step

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

    key_pivot: Any
    value_pivot: Any
    key_count: Any
    value_count: Any
    scale: Any


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


def make_plan(rule: Rule, query, key, value, sizes: BlockSizes, *, reverse: bool) -> Plan:
    """Picks the blocks of a call; the same for the forward and the backward pass."""
    batch, length, heads, dim = key.shape
    layout = HeadLayout(heads, dim, value.shape[-1])
    dtype = jnp.result_type(query, key, value)
    queries = query.shape[2] // heads
    step_groups = groups_per_step(layout, sizes.causal_lanes // queries)
    # What the backward pass reads and writes per token: it must cut the tokens as the forward does.
    lanes = (2 * queries + 2) * layout.lanes + (queries + 2) * layout.value_lanes
    most = sizes.causal_bytes // (step_groups * lanes * dtype.itemsize)
    most = max(min(most, sizes.causal_tokens) // sizes.chunk, 1) * sizes.chunk
    tokens = pl.cdiv(length, pl.cdiv(length, most))
    chunk = min(sizes.chunk, pl.cdiv(tokens, SUBLANES) * SUBLANES)
    tokens = pl.cdiv(tokens, chunk) * chunk
    tiling = Tiling(layout, batch, length, tokens, step_groups, reverse=reverse)
    return Plan(rule, tiling, chunk, queries, dtype)


def token_operands(plan: Plan, query, key, value, mask, state):
    """The arrays that both kernels read, and their block specs."""
    layout, tiling = plan.layout, plan.tiling
    sums, key_pivot, value_pivot, scale = state
    constant = plan.rule.features.constant
    count = sums[..., -1, -1] if constant else jnp.zeros_like(scale)
    moments = pack_sums(layout, sums, constant=constant)

    rows = Rows(
        layout.pack_rows(key_pivot, values=False),
        layout.pack_rows(value_pivot, values=True),
        layout.spread_rows(count, values=False),
        layout.spread_rows(count, values=True),
        layout.spread_rows(scale, values=False),
    )
    masks = () if mask is None else _chunk_rows(plan, mask)
    operands = (
        query_lanes(query, layout.head_lanes),
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
    return pl.BlockSpec(sizes, lambda b, c, s, t: (b, 0 if shared else c, tiling.block(s, t), 0, 0))


def saved_shapes(plan: Plan) -> Moments:
    """The moments before each token block, [batch, groups, blocks, ...]."""
    sizes = (plan.tiling.batch, plan.layout.groups, plan.tiling.blocks)
    return Moments(*(jax.ShapeDtypeStruct((*sizes, *shape), jnp.float32) for shape in plan.moments))


def saved_specs(plan: Plan) -> Moments:
    """Blocks of the saved moments: those of the step's token block."""
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


def scratch(plan: Plan, *leading: int) -> Moments:
    """Room in VMEM for the moments of a step's groups, `leading` times."""
    sizes = (*leading, plan.tiling.step_groups)
    return Moments(*(pltpu.VMEM((*sizes, *shape), jnp.float32) for shape in plan.moments))


def pack_sums(layout: HeadLayout, sums: jax.Array, *, constant: bool) -> Moments:
    """Sums [batch, heads, features, value_dim + 1] as moments [batch, groups, ...]."""
    matrix, features, values = split_sums(sums, constant=constant)
    return Moments(
        layout.pack_matrix(matrix),
        layout.pack_rows(features, values=False),
        layout.pack_rows(values, values=True),
    )


def unpack_sums(layout: HeadLayout, moments: Moments, count: jax.Array | None) -> jax.Array:
    """The inverse of `pack_sums`, given the count that goes with a constant feature."""
    values = layout.unpack_rows(moments.values, values=True)
    return join_sums(
        layout.unpack_matrix(moments.matrix),
        layout.unpack_rows(moments.features, values=False),
        None if count is None else values,
        jnp.zeros(()) if count is None else count,
    )


def query_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """[batch, tokens, heads, dim] to [batch, tokens, heads · lanes]."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, lanes - x.shape[-1])])
    return x.reshape(*x.shape[:2], x.shape[2] * lanes)
