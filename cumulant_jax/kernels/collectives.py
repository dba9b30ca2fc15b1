"""Sums over the shards of an axis, with the derivatives that one shard's share of a program has.

Inside an operation of `over_mesh` every shard differentiates its own part: what it gets is the
cotangent of its own results, and of results that all shards share, the same on each. So a sum that
all share passes its cotangent on as it is, and what all shards read collects theirs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

Names = tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_sum(x: jax.Array, axes: Names) -> jax.Array:
    """The sum over all shards, which all of them share."""
    return lax.psum(x, axes) if axes else x


all_sum.defvjp(lambda x, axes: (all_sum(x, axes), None), lambda axes, _, bar: (bar,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared(x: jax.Array, axes: Names) -> jax.Array:
    """An input that all shards share."""
    return x


shared.defvjp(lambda x, axes: (x, None), lambda axes, _, bar: (all_sum(bar, axes),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_before(x: jax.Array, axes: Names) -> jax.Array:
    """The sum over the shards before this one, zero on the first."""
    return _sum_where(x, axes, lambda shard, own: shard < own)


def sum_after(x: jax.Array, axes: Names) -> jax.Array:
    """The sum over the shards after this one, zero on the last."""
    return _sum_where(x, axes, lambda shard, own: shard > own)


sum_before.defvjp(
    lambda x, axes: (sum_before(x, axes), None), lambda axes, _, bar: (sum_after(bar, axes),)
)


def _sum_where(x, axes, choose):
    if not axes:
        return jnp.zeros_like(x)
    every = lax.all_gather(x, axes)
    chosen = choose(jnp.arange(every.shape[0]), lax.axis_index(axes))
    return jnp.tensordot(chosen.astype(x.dtype), every, axes=1)


def gathered_softmax(x: jax.Array, axes: Names) -> jax.Array:
    """The softmax over the last axis, of which every shard has an equal part."""
    if not axes:
        return jax.nn.softmax(x, axis=-1)
    every = jax.nn.softmax(lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True), axis=-1)
    start = lax.axis_index(axes) * x.shape[-1]
    return lax.dynamic_slice_in_dim(every, start, x.shape[-1], axis=-1)
