"""The state of causal softmax attention: the keys and values of all tokens so far."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from cumulant_jax.attention import softmax_attention


class KeyValueCache(NamedTuple):
    """What softmax attention carries from one call to the next; it grows with the capacity.

    Attributes:
      key: [batch, capacity, heads, dim].
      value: [batch, capacity, heads, dim].
      mask: bool [batch, capacity], True = a token that may be attended to.
      length: int32, how many places are taken, by padding too.
    """

    key: Array
    value: Array
    mask: Array
    length: Array


def empty_cache(batch: int, capacity: int, heads: int, dim: int, dtype: jnp.dtype) -> KeyValueCache:
    """The cache before the first token."""
    zeros = jnp.zeros((batch, capacity, heads, dim), dtype)
    return KeyValueCache(zeros, zeros, jnp.zeros((batch, capacity), bool), jnp.int32(0))


def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    initial_state: KeyValueCache,
    mask: Array | None = None,
    is_causal: bool = True,
    return_state: bool = True,
    **options: Any,
) -> tuple[Array, KeyValueCache]:
    """Causal softmax attention of tokens that come after those of a cache.

    Args:
      query: [batch, tokens, heads, dim].
      key: [batch, tokens, heads, dim].
      value: [batch, tokens, heads, dim].
      initial_state: the tokens so far; there must be room for these.
      mask: bool [batch, tokens], True = the token may be attended to.
      is_causal: always True; there as the attention functions have it.
      return_state: likewise.
      **options: of `softmax_attention`, such as `scale`.

    Returns:
      [batch, tokens, heads, dim], and the cache with these tokens in it.
    """
    del is_causal, return_state
    cache = initial_state
    batch, tokens = key.shape[:2]
    present = jnp.ones((batch, tokens), bool) if mask is None else mask

    def put(store: Array, new: Array) -> Array:
        start = (0, cache.length) + (0,) * (store.ndim - 2)
        return lax.dynamic_update_slice(store, new.astype(store.dtype), start)

    cache = KeyValueCache(
        put(cache.key, key),
        put(cache.value, value),
        put(cache.mask, present),
        cache.length + tokens,
    )
    # Query t of these stands at place length + t and sees the places up to its own.
    place = initial_state.length + jnp.arange(tokens)
    visible = jnp.arange(cache.key.shape[1]) <= place[:, None]
    visible = visible[None, None] & cache.mask[:, None, None, :]
    return softmax_attention(query, cache.key, cache.value, mask=visible, **options), cache
