"""Masks: which keys may be attended to.

A mask is boolean, True meaning attend. It is `[*batch, S]`, or anything that broadcasts to
`[*batch, H, T, S]`; `[*batch, S]` is tried first. The linear-time kinds sum over the keys once for
all queries, so their mask must not depend on the query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def full_mask(
    mask: Any,
    key_value_seq_lengths: Any,
    *,
    batch: tuple[int, ...],
    heads: int,
    queries: int,
    keys: int,
) -> jax.Array | None:
    """Combines mask and lengths into one mask [*batch, heads or 1, queries or 1, keys], or None."""
    result = None
    if mask is not None:
        result = _expand_mask(mask, batch=batch, heads=heads, queries=queries, keys=keys)
    if key_value_seq_lengths is not None:
        present = sequence_mask("key_value_seq_lengths", key_value_seq_lengths, batch, keys)
        present = present[..., None, None, :]
        result = present if result is None else result & present
    return result


def key_mask(
    mask: Any,
    key_value_seq_lengths: Any,
    *,
    batch: tuple[int, ...],
    heads: int,
    queries: int,
    keys: int,
    operation: str,
) -> jax.Array | None:
    """Combines mask and lengths into one mask [*batch, keys, heads or 1], or None.

    Raises:
      ValueError: the mask depends on the query.
    """
    result = full_mask(
        mask, key_value_seq_lengths, batch=batch, heads=heads, queries=queries, keys=keys
    )
    if result is None:
        return None
    if result.shape[-2] != 1:
        raise ValueError(
            f"mask of {operation} must not depend on the query, but has shape {jnp.shape(mask)} "
            f"with {queries} queries: the keys are summed once for all. Give [*batch, keys] "
            "or [*batch, heads, 1, keys]; for causal attention use is_causal instead of a mask."
        )
    return jnp.swapaxes(result[..., 0, :], -1, -2)


def sequence_mask(name: str, lengths: Any, batch: tuple[int, ...], tokens: int) -> jax.Array:
    """Turns lengths [*batch] into a mask [*batch, tokens], True below the length."""
    if not isinstance(lengths, jax.Array):
        lengths = np.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be an array of integers; got {lengths.dtype}.")
    if not _broadcasts(lengths.shape, batch):
        raise ValueError(f"{name} must be [*batch] = {batch}; got shape {lengths.shape}.")
    # Clipped first: a 64-bit length need not fit what jax keeps of it.
    lengths = jnp.broadcast_to(jnp.asarray(lengths.clip(0, tokens)), batch)
    return jnp.arange(tokens).reshape(*(1,) * len(batch), tokens) < lengths[..., None]


def token_mask(
    mask: Any, seq_lengths: Any, batch: tuple[int, ...], tokens: int
) -> jax.Array | None:
    """Combines a mask [*batch, tokens] and lengths [*batch] into [*batch, tokens], or None."""
    result = None
    if mask is not None:
        mask = _check_boolean(mask)
        if not _broadcasts(mask.shape, (*batch, tokens)):
            raise ValueError(
                f"mask must broadcast to [*batch, tokens] = {(*batch, tokens)}; got {mask.shape}."
            )
        result = jnp.broadcast_to(mask, (*batch, tokens))
    if seq_lengths is not None:
        present = sequence_mask("seq_lengths", seq_lengths, batch, tokens)
        result = present if result is None else result & present
    return result


def _expand_mask(mask: Any, *, batch, heads, queries, keys) -> jax.Array:
    mask = _check_boolean(mask)
    rank = len(batch)
    if _broadcasts(mask.shape, (*batch, keys)):
        return jnp.broadcast_to(mask, (*batch, keys))[..., None, None, :]
    if not _broadcasts(mask.shape, (*batch, heads, queries, keys)):
        raise ValueError(
            f"mask must be [*batch, keys] = {(*batch, keys)} or broadcast to [*batch, heads, "
            f"queries, keys] = {(*batch, heads, queries, keys)}; got shape {mask.shape}."
        )
    mask = mask.reshape((1,) * (rank + 3 - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, (*batch, *mask.shape[-3:-1], keys))


def _check_boolean(mask: Any) -> jax.Array:
    if not isinstance(mask, (jax.Array, np.ndarray)):
        raise TypeError(f"mask must be a boolean array; got {type(mask).__name__}.")
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean, True = attend; got {mask.dtype}. Compare first, e.g. mask > 0."
        )
    return jnp.asarray(mask)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    return all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))
