"""The causal pass: every query reads out the moments of the tokens up to its own.

Inside a chunk the tokens are few enough for a small dense product; between chunks a state of moment
sums is carried. Time and memory are linear in the tokens, and the last state lets decoding go on in
constant memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.moments import Features, accumulation_dtype, masked_mean

# effective(query, feature_sums) -> query features; both [..., tokens, ...] per head.
Effective = Callable[[jax.Array, jax.Array], jax.Array]

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


def empty_state(
    num_features: int, key: jax.Array, value: jax.Array, mask: jax.Array | None, *, pivot: bool
) -> MomentState:
    """The state before the first token.

    Args:
      num_features: features per key.
      key: [..., tokens, key_heads, dim], the tokens about to come.
      value: [..., tokens, key_heads, value_dim].
      mask: None or bool [..., tokens, key_heads or 1].
      pivot: whether to measure keys and values from the mean of the first unmasked tokens (not from
        the first one alone: a class or start token is often an outlier), or from zero.
    """
    dtype = accumulation_dtype(key, value)
    key_pivot, value_pivot = (
        lax.stop_gradient(_first_mean(x, mask)).astype(dtype)
        if pivot
        else _carried_zeros((*x.shape[:-3], *x.shape[-2:]), dtype, like=(key, value))
        for x in (key, value)
    )
    shape = (*key.shape[:-3], key.shape[-2], num_features, value.shape[-1] + 1)
    return MomentState(_carried_zeros(shape, dtype, like=(key, value)), key_pivot, value_pivot)


def _carried_zeros(shape: tuple[int, ...], dtype, *, like: tuple[jax.Array, ...]) -> jax.Array:
    """Zeros that a loop over `like` may carry, under shard_map too.

    There a carry must vary over the same mesh axes going in as coming out. A zero selected by the
    inputs does so in every version of jax; XLA folds it to a constant.
    """
    zero = sum(jnp.where(x[(0,) * x.ndim] == 0, 0, 0) for x in like if 0 not in x.shape)
    return jnp.broadcast_to(jnp.asarray(zero, dtype), shape)


def _first_mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return masked_mean(x[..., :CHUNK, :, :], None)
    return masked_mean(x, mask & (jnp.cumsum(mask, axis=-2) <= CHUNK))


def causal_read_out(
    features: Features,
    effective: Effective,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    state: MomentState,
) -> tuple[jax.Array, MomentState]:
    """Sums moments and reads them out, token by token in effect, chunk by chunk in fact.

    Args:
      features: feature map of the keys, from dim to `features`.
      effective: `effective(query, feature_sums)`, which turns queries [..., groups, tokens, dim]
        and the sums of the features up to each token [..., 1, tokens, features] into what
        multiplies the moments, [..., groups, tokens, features].
      query: [..., tokens, heads, dim].
      key: [..., tokens, key_heads, dim].
      value: [..., tokens, key_heads, value_dim].
      mask: None or bool [..., tokens, key_heads or 1].
      state: what the tokens so far amount to.

    Returns:
      The read-out [..., tokens, heads, value_dim + 1], whose last column belongs to the constant 1
      that is appended to the values, and the state after the last token; in the state's dtype.
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
        key = jnp.where(mask, key.astype(sums.dtype) - state.key_pivot[..., None, :], 0)
        value = value.astype(sums.dtype) - state.value_pivot[..., None, :]
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
        value = jnp.where(mask, value, 0)
        key = features(key)

        key_heads = key.shape[-3]
        query = query.astype(sums.dtype)
        query = query.reshape(*query.shape[:-3], key_heads, heads // key_heads, *query.shape[-2:])
        present = jnp.cumsum(jnp.where(mask, key, 0), axis=-2) + sums[..., None, :, -1]
        query = effective(query, present[..., None, :, :])
        scores = jnp.einsum("...kgtf,...ksf->...kgts", query, key)
        scores = jnp.tril(scores)
        out = jnp.einsum("...kgts,...ksv->...kgtv", scores, value)
        out = out + jnp.einsum("...kgtf,...kfv->...kgtv", query, sums)
        out = out.reshape(*out.shape[:-4], heads, *out.shape[-2:])
        sums = sums + jnp.einsum("...tf,...tv->...fv", key, value)
        return sums, _head_major(out)

    sums, out = lax.scan(step, state.sums, chunks)
    out = jnp.moveaxis(out, 0, -4)
    out = out.reshape(*out.shape[:-4], out.shape[-4] * chunk, *out.shape[-2:])
    return out[..., :length, :, :], state._replace(sums=sums)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[..., tokens, heads, dim] to [chunks, ..., chunk, heads, dim], padded with zeros."""
    chunks = -(-x.shape[-3] // chunk)
    padding = chunks * chunk - x.shape[-3]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, padding), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:-3], chunks, chunk, *x.shape[-2:]), -4, 0)


def _head_major(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -3, -2)
