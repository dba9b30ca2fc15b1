"""Pivots: vectors near the mean of the tokens, from which moments are measured.

Moments about a pivot are exact for any pivot, and rounding is harmless while it is within about a
standard deviation of the mean. So a sample of the tokens will do, and saves a pass over all of
them. It is spread over the whole sequence: the first tokens alone may be far from the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

SAMPLE = 128


def spread_mean(x: jax.Array, mask: jax.Array | None, axes: Sequence[str] = ()) -> jax.Array:
    """The mean of tokens spread evenly over the unmasked ones, zero where there are none.

    Args:
      x: [..., tokens, heads, dim], float32 or wider for the result's precision.
      mask: None or bool [..., tokens, heads or 1].
      axes: mesh axes over which the tokens are sharded, under shard_map.

    Returns:
      [..., heads, dim] in float32, or float64 for a float64 `x`.
    """
    sample, present = _sample(x, mask)
    dtype = jnp.result_type(jnp.float32, x.dtype)
    total = jnp.sum(sample, axis=-3, dtype=dtype, where=present[..., None])
    count = jnp.sum(present, axis=-2, dtype=dtype)
    if axes:
        total, count = lax.psum((total, count), tuple(axes))
    return lax.stop_gradient(total / jnp.maximum(count, 1)[..., None])


def first_mean(x: jax.Array, mask: jax.Array | None, axes: Sequence[str] = ()) -> jax.Array:
    """The mean of the first SAMPLE unmasked tokens, zero where there are none.

    The pivot of causal attention: tokens that come later must not change what was before, not even
    in rounding. Not the first token alone, which is often an outlier.

    Args:
      x: [..., tokens, heads, dim].
      mask: None or bool [..., tokens, heads or 1].
      axes: mesh axes over which the tokens are sharded, under shard_map.

    Returns:
      [..., heads, dim] in float32, or float64 for a float64 `x`.
    """
    if mask is None:
        x, present = x[..., :SAMPLE, :, :], jnp.ones((1,) * (x.ndim - 1), bool)
        present = jnp.broadcast_to(present, (*x.shape[:-1][:-1], 1))
    else:
        present = mask & (jnp.cumsum(mask, axis=-2) <= SAMPLE)
    dtype = jnp.result_type(jnp.float32, x.dtype)
    total = jnp.sum(x, axis=-3, dtype=dtype, where=present[..., None])
    count = jnp.sum(present, axis=-2, dtype=dtype)
    if axes:
        total, count = _of_first_shard(total, count, tuple(axes))
    return lax.stop_gradient(total / jnp.maximum(count, 1)[..., None])


def _of_first_shard(total, count, axes):
    """The sums of the first shard that has tokens."""
    totals, counts = lax.all_gather((total, count), axes)
    first = jnp.argmax(counts > 0, axis=0)[None]
    count = jnp.take_along_axis(counts, first, axis=0)[0]
    return jnp.take_along_axis(totals, first[..., None], axis=0)[0], count


def _sample(x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """About SAMPLE tokens of x, and which of them take part."""
    tokens = x.shape[-3]
    everything = not isinstance(tokens, int) or tokens <= SAMPLE
    if mask is None:
        sample = x if everything else x[..., :: tokens // SAMPLE, :, :]
        return sample, jnp.ones((1,) * (x.ndim - 3) + (sample.shape[-3], 1), bool)
    if everything:
        return x, mask
    rank = jnp.moveaxis(jnp.cumsum(mask, axis=-2), -2, -1)
    wanted = 1 + jnp.arange(SAMPLE) * rank[..., -1:] // SAMPLE
    find = jnp.vectorize(jnp.searchsorted, signature="(s),(n)->(n)")
    index = jnp.minimum(jnp.moveaxis(find(rank, wanted), -1, -2), tokens - 1)
    present = jnp.take_along_axis(mask, index, axis=-2)
    return jnp.take_along_axis(x, index[..., None], axis=-3), present
