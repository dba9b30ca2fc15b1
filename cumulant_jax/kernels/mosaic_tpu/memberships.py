"""What the token statistics kernels share: all heads side by side, sums over lanes of a head.

Every step sees all heads of its tokens, since memberships are a softmax over heads. A head's lanes
are summed, and its number is written to its lanes, by a product with a 0/1 matrix; so dims need no
padding. Numbers per head live in one register row, [tokens, 128].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.mosaic_tpu.body import dot, rounded
from cumulant_jax.kernels.mosaic_tpu.layout import LANES, all_of, keep, spread, within

MEMBERSHIP_EPS = 1e-8


def halves(x: jax.Array, dtype) -> list[jax.Array]:
    """`x` as a sum of what goes into the matrix unit: float32 whole, else its leading 16 bits.

    The square of a bfloat16 number has 16 bits, so such a sum over tokens or lanes is exact.
    """
    if dtype == jnp.float32:
        return [x]
    high = rounded(x, dtype)
    return [high, x - high]


def lanes_of_heads(heads: int, dim: int) -> jax.Array:
    """[128, heads · dim], 1 where the lane belongs to the head of the row."""
    shape = (LANES, heads * dim)
    first = lax.broadcasted_iota(jnp.int32, shape, 0) * dim
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    return ((lane >= first) & (lane < first + dim)).astype(jnp.float32)


def sum_heads(x: jax.Array, members: jax.Array, dtype) -> jax.Array:
    """[tokens, heads · dim] to [tokens, 128], summed over the lanes of each head."""
    return dot(x, members, (1, 1), dtype)


def to_heads(x: jax.Array, members: jax.Array, dtype) -> jax.Array:
    """[tokens, 128] to [tokens, heads · dim]: each head's number in all of its lanes."""
    return dot(x, members, (1, 0), dtype)


def running_sum(x: jax.Array, dtype) -> jax.Array:
    """The sums of [tokens, any] over the tokens up to each one."""
    shape = (x.shape[0], x.shape[0])
    lower = lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)
    lower = lower.astype(jnp.float32)
    first, *rest = (dot(lower, half, (1, 0), dtype) for half in halves(x, dtype))
    return sum(rest, start=first)


def memberships(logits: jax.Array, heads: int, valid: jax.Array | None) -> jax.Array:
    """The softmax of [tokens, 128] over the heads, 0 where a token is not valid."""
    is_head = lax.broadcasted_iota(jnp.int32, logits.shape, 1) < heads
    logits = jnp.where(is_head, logits, -jnp.inf)
    exps = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True)))
    pi = exps / jnp.sum(exps, axis=1, keepdims=True)
    return keep(pi, None if valid is None else valid[:, :LANES])


def valid_tokens(
    tokens: int, start, length: int | None, mask: jax.Array | None
) -> jax.Array | None:
    """Bool [tokens, 128], the same in all lanes; None where all tokens are valid.

    Args:
      tokens: tokens of the block.
      start: position of its first token.
      length: number of tokens in all, None where the block ends before.
      mask: None or a row of the mask, [1, tokens].
    """
    ends = None if length is None else within((tokens, LANES), 0, start, length)
    return all_of(ends, None if mask is None else spread(mask, LANES) > 0.5)


def keep_tokens(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """`x` [tokens, any] where the token is valid, 0 elsewhere."""
    if valid is None:
        return x
    column = valid.astype(jnp.float32)[:, :1] > 0.5
    return jnp.where(column, x, 0)


def per_head_row(x: jax.Array) -> jax.Array:
    """[..., heads] as float32 [..., 128]."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, LANES - x.shape[-1])]
    return jnp.pad(x.astype(jnp.float32), padding)
