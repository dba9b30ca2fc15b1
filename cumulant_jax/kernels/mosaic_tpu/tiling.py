"""The grid of a pass over tokens and the blocks that each of its steps sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels.block_sizes import tuned
from cumulant_jax.kernels.mosaic_tpu.layout import (
    LANES,
    HeadLayout,
    all_of,
    keep,
    spread,
    within,
)

# Rows of a bfloat16 register; float32 ones have half as many.
SUBLANES = 16


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How much one grid step holds in VMEM.

    A step should move about a megabyte: less, and starting it (a third of a microsecond) shows;
    more, and the float32 intermediates no longer fit beside the double buffers.

    Attributes:
      tokens: tokens per step, a multiple of 128; halved for float32 inputs.
      lanes: lanes of keys or values per step; a group of heads that is wider goes alone.
      fused_bytes: inputs and outputs of one step over a whole short sequence.
      fused_lanes: the most lanes of such a step, however short the sequence.
      causal_tokens: the most tokens per step of the causal pass, which saves its state once a step.
      causal_lanes: lanes of queries per step of the causal pass.
      causal_bytes: inputs and outputs of one step of its backward pass.
      statistics_elements: numbers per block of the token statistics, all heads of its tokens.
      chunk: tokens per chunk of the causal pass, whose dense part costs chunk² per head.
    """

    tokens: int = 512
    lanes: int = 512
    fused_bytes: int = 2 << 20
    fused_lanes: int = 1024
    causal_tokens: int = 1024
    causal_lanes: int = 256
    causal_bytes: int = 7 << 19
    statistics_elements: int = 3 << 16
    chunk: int = 128


# For kernels with many float32 intermediates: of 128 MiB on v5e and v6e and 64 MiB on v5p. The
# compiler's own limit, 16 MiB on v5e, leaves it more room to prefetch for what comes next.
VMEM_BYTES = 40 << 20
DEFAULT_SIZES = BlockSizes()


def block_sizes(device_kind: str = "") -> BlockSizes:
    """The block sizes for a device kind, as `jax.Device.device_kind` names it.

    >>> block_sizes("TPU v5 lite").tokens
    512
    """
    sizes = tuned("mosaic_tpu", device_kind)
    unknown = set(sizes) - {field.name for field in dataclasses.fields(BlockSizes)}
    if unknown:
        raise ValueError(f"the table of block sizes has unknown sizes {sorted(unknown)}")
    return dataclasses.replace(DEFAULT_SIZES, **sizes)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A grid (batch, head groups, splits, token blocks) over one layout of heads.

    Attributes:
      layout: the heads and how they share lanes.
      batch: rows of the batch axis.
      length: number of tokens.
      tokens: tokens per block.
      step_groups: groups of heads per step.
      splits: parts into which the token axis is cut, so that the two cores of a chip that has two
        both work where batch and heads alone give them nothing to share.
      reverse: whether the last token block comes first.
    """

    layout: HeadLayout
    batch: int
    length: int
    tokens: int
    step_groups: int
    splits: int = 1
    reverse: bool = False

    @classmethod
    def choose(
        cls, layout: HeadLayout, batch: int, length: int, dtype, sizes: BlockSizes, *, split: bool
    ) -> Tiling:
        """Picks blocks for inputs of `dtype`; `split` where the pass sums over tokens."""
        tokens = sizes.tokens // (2 if dtype == jnp.float32 else 1)
        tokens = min(tokens, pl.cdiv(length, LANES) * LANES)
        step_groups = groups_per_step(layout, sizes.lanes)
        blocks = pl.cdiv(length, tokens)
        alone = batch * (layout.groups // step_groups) == 1
        splits = 2 if split and alone and blocks % 2 == 0 else 1
        return cls(layout, batch, length, tokens, step_groups, splits)

    @classmethod
    def whole(cls, layout: HeadLayout, batch: int, length: int, step_groups: int) -> Tiling:
        """The tiling that keeps all tokens in VMEM."""
        return cls(layout, batch, length, pl.cdiv(length, SUBLANES) * SUBLANES, step_groups)

    @property
    def blocks(self) -> int:
        """Token blocks of one split."""
        return pl.cdiv(pl.cdiv(self.length, self.tokens), self.splits)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """(batch, steps over head groups, splits, token blocks)."""
        return self.batch, self.layout.groups // self.step_groups, self.splits, self.blocks

    def per_token(self, lanes: int) -> pl.BlockSpec:
        """Blocks of [batch, tokens, all lanes], for `lanes` per group."""
        return pl.BlockSpec(
            (1, self.tokens, self.step_groups * lanes),
            lambda b, c, s, t: (b, self.block(s, t), c),
        )

    def block(self, split, step):
        """Which token block a step sees."""
        return split * self.blocks + (self.blocks - 1 - step if self.reverse else step)

    def per_group(self, *shape: int) -> pl.BlockSpec:
        """Blocks of [batch, groups, *shape]."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec((1, self.step_groups, *shape), lambda b, c, s, t: (b, c, *zeros))

    def partial(self, *shape: int) -> pl.BlockSpec:
        """Blocks of the sums [splits, batch, groups, *shape]."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (None, 1, self.step_groups, *shape), lambda b, c, s, t: (s, b, c, *zeros)
        )

    def partial_shape(self, *shape: int) -> jax.ShapeDtypeStruct:
        """The array that `partial` cuts into blocks."""
        sizes = (self.splits, self.batch, self.layout.groups, *shape)
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def mask(self, rows: jax.Array) -> pl.BlockSpec:
        """Blocks of a mask from `HeadLayout.pack_mask`."""
        groups, heads = rows.shape[1:3]
        shared = groups == 1 and heads == 1
        return pl.BlockSpec(
            (1, 1 if shared else self.step_groups, heads, self.tokens),
            lambda b, c, s, t: (b, 0 if shared else c, 0, self.block(s, t)),
        )

    def valid(
        self, group: int, lanes: int, mask: tuple[jax.Array, ...] = (), *, offset=0, tokens: int = 0
    ) -> jax.Array | None:
        """Where a block of keys, values or queries of one group holds something; for kernels.

        Args:
          group: index of the group within the step.
          lanes: lanes of the group.
          mask: rows of the mask, [heads, tokens], if there is one.
          offset: where in the block to begin.
          tokens: how many tokens of the block; 0 for all.

        Returns:
          Bool [tokens, lanes], or None where all of it is valid.
        """
        tokens = tokens or self.tokens
        conditions = [self.valid_lanes(group, lanes, tokens=tokens)]
        if self.length % self.tokens:
            start = self.block(pl.program_id(2), pl.program_id(3)) * self.tokens + offset
            conditions.append(within((tokens, lanes), 0, start, self.length))
        conditions += [spread(rows, lanes) > 0.5 for rows in mask]
        return all_of(*conditions)

    def valid_lanes(self, group: int, lanes: int, *, tokens: int = 0) -> jax.Array | None:
        """Where the lanes belong to a head; the last group may have too few."""
        if self.layout.heads % self.layout.packed == 0:
            return None
        start = (pl.program_id(1) * self.step_groups + group) * lanes
        stop = self.layout.heads * (lanes // self.layout.packed)
        return within((tokens or self.tokens, lanes), 1, start, stop)

    def flops(self, products: int) -> int:
        """Operations of so many products [value_lanes] x [lanes] per token, of whole groups."""
        layout = self.layout
        return (
            products * self.batch * self.length * layout.groups * layout.lanes * layout.value_lanes
        )


def groups_per_step(layout: HeadLayout, lanes: int) -> int:
    """The largest divisor of the number of groups that stays within `lanes`, at least 1."""
    most = max(lanes // max(layout.lanes, layout.value_lanes), 1)
    return max(n for n in range(1, most + 1) if layout.groups % n == 0)


def mask_rows(mask: tuple, group: int) -> tuple[jax.Array, ...]:
    """One group's rows [heads, tokens] of the block of a mask, which all groups may share."""
    return tuple(ref[0, min(group, ref.shape[1] - 1)] for ref in mask)


def load(ref, group: int, lanes: int, valid: jax.Array | None = None) -> jax.Array:
    """One group's lanes of a token block, in float32 with what is not valid set to 0."""
    return keep(ref[0, :, group * lanes : (group + 1) * lanes].astype(jnp.float32), valid)


def zero_first(refs: Any) -> None:
    """Sets sums over token blocks to zero before the first one."""

    @pl.when(pl.program_id(3) == 0)
    def _():
        for ref in jax.tree.leaves(refs):
            ref[...] = jnp.zeros_like(ref)


def store(ref, group: int, lanes: int, x: jax.Array) -> None:
    """Writes one group's lanes of a token block."""
    ref[0, :, group * lanes : (group + 1) * lanes] = x.astype(ref.dtype)


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    name: str,
    grid: tuple[int, ...],
    in_specs: Any,
    out_specs: Any,
    sequential: int,
    scratch_shapes: Any = (),
    flops: int,
    vmem_bytes: int | None = None,
) -> Callable[..., Any]:
    """A Mosaic TPU kernel whose last `sequential` grid axes run in order.

    The other axes are independent of each other and may be shared out between cores.
    """
    parallel = len(grid) - sequential

    def run(*operands):
        arrays = jax.tree.leaves((operands, out_shape))
        cost = pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        )
        return pl.pallas_call(
            kernel,
            out_shape,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * parallel + ("arbitrary",) * sequential,
                vmem_limit_bytes=vmem_bytes,
            ),
            cost_estimate=cost,
            name=name,
        )(*operands)

    return run
