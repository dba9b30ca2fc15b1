"""The causal pass: every query reads out the moments of the tokens up to its own.

Inside a chunk the tokens are few enough for a small dense product; between chunks a state of moment
sums is carried. Time and memory are linear in the tokens, and the last state lets decoding go on in
constant memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.reading import Reading

CHUNK = 128


class MomentState(NamedTuple):
    """What causal attention carries from one call to the next.

    Attributes:
      sums: [*batch, key_heads, features, value_dim + 1], moments of the tokens so far.
      key_pivot: [*batch, key_heads, dim], what the keys were measured from.
      value_pivot: [*batch, key_heads, value_dim], likewise the values.
    """

    sums: jax.Array
    key_pivot: jax.Array
    value_pivot: jax.Array


def causal_read_out(
    reading: Reading,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    sums: jax.Array,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sums moments and reads them out, token by token in effect, chunk by chunk in fact.

    Args:
      reading: the kind of attention.
      query: [..., tokens, heads, dim].
      key: [..., tokens, key_heads, dim].
      value: [..., tokens, key_heads, value_dim].
      mask: None or bool [..., tokens, key_heads or 1].
      scale: [..., key_heads], factor on the queries.
      sums: [..., key_heads, features, value_dim + 1], the moments of the tokens so far.
      key_pivot: [..., key_heads, dim].
      value_pivot: [..., key_heads, value_dim].

    Returns:
      [..., tokens, heads, value_dim] in the dtype of `value`, and the sums after the last token.
    """
    length, heads = query.shape[-3:-1]
    chunk = min(CHUNK, length)
    if mask is None:
        mask = jnp.ones((*key.shape[:-2], 1), bool)
    chunks = tuple(_split(x, chunk) for x in (query, key, value, mask[..., None]))

    # The backward pass recomputes a chunk from its inputs and the state before it.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(sums, tokens):
        query, key, value, mask = (_head_major(x) for x in tokens)
        key = jnp.where(mask, key.astype(sums.dtype) - key_pivot[..., None, :], 0)
        value = value.astype(sums.dtype) - value_pivot[..., None, :]
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
        value = jnp.where(mask, value, 0)
        key = reading.features(key)

        key_heads = key.shape[-3]
        query = query.astype(sums.dtype)
        query = query.reshape(*query.shape[:-3], key_heads, heads // key_heads, *query.shape[-2:])
        present = running_sum(jnp.where(mask, key, 0)) + sums[..., None, :, -1]
        query = reading.effective(query, present[..., None, :, :], scale, dim=key_pivot.shape[-1])
        scores = jnp.einsum("...kgtf,...ksf->...kgts", query, key)
        scores = jnp.tril(scores)
        out = jnp.einsum("...kgts,...ksv->...kgtv", scores, value)
        out = out + jnp.einsum("...kgtf,...kfv->...kgtv", query, sums)
        out = out.reshape(*out.shape[:-4], heads, *out.shape[-2:])
        sums = sums + jnp.einsum("...tf,...tv->...fv", key, value)
        return sums, _head_major(out)

    sums, out = lax.scan(step, sums, chunks)
    out = jnp.moveaxis(out, 0, -4)
    out = out.reshape(*out.shape[:-4], out.shape[-4] * chunk, *out.shape[-2:])
    pivot = jnp.repeat(value_pivot, heads // value_pivot.shape[-2], axis=-2)
    return reading.finish(out[..., :length, :, :], pivot).astype(value.dtype), sums


def running_sum(x: jax.Array) -> jax.Array:
    """The sums of x [..., tokens, dim] up to each token.

    As a product with a triangle of ones: for a chunk of tokens several times faster than the scan
    that `jnp.cumsum` is, and its gradient too.
    """
    ones = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), x.dtype))
    return jnp.matmul(ones, x, precision=lax.Precision.HIGHEST)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[..., tokens, heads, dim] to [chunks, ..., chunk, heads, dim], padded with zeros."""
    chunks = -(-x.shape[-3] // chunk)
    padding = chunks * chunk - x.shape[-3]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, padding), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:-3], chunks, chunk, *x.shape[-2:]), -4, 0)


def _head_major(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -3, -2)
