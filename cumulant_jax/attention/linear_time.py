"""What the linear-time kinds do before their passes: checks, the key mask, the carried state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.masks import key_mask
from cumulant_jax.kernels import choose_implementation


class Prepared(NamedTuple):
    """Checked arguments: mask is [*batch, keys, key_heads or 1] or None, dtype the output's."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | None
    scale: float | jax.Array
    dtype: jnp.dtype


def prepare(
    operation: str,
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any,
    key_value_seq_lengths: Any,
    is_causal: bool,
    scale: Any,
    implementation: str | None,
    initial_state: Any,
    return_state: bool,
) -> Prepared:
    """Checks the arguments that the linear-time kinds share, under the names they have there."""
    query, key, value = arguments.check_query_key_value(query, key, value, is_causal=is_causal)
    choose_implementation(implementation, operation)
    check_state_options(initial_state, return_state=return_state, is_causal=is_causal)
    scale = arguments.check_scale(scale, query.shape[-1])
    mask = key_mask(
        mask,
        key_value_seq_lengths,
        batch=query.shape[:-3],
        heads=query.shape[-2],
        queries=query.shape[-3],
        keys=key.shape[-3],
        operation=operation,
    )
    if mask is not None and mask.shape[-1] not in (1, key.shape[-2]):
        # The mask differs between query heads that share a key head: their moments differ too.
        repeats = mask.shape[-1] // key.shape[-2]
        key, value = (jnp.repeat(x, repeats, axis=-2) for x in (key, value))
    dtype = value.dtype
    if jnp.float64 in (query.dtype, key.dtype, value.dtype):
        query, key, value = (x.astype(jnp.float64) for x in (query, key, value))
    return Prepared(query, key, value, mask, scale, dtype)


def check_state_options(initial_state: Any, *, return_state: bool, is_causal: bool) -> None:
    """Raises where a carried state is asked of a bidirectional call."""
    arguments.check_flag("return_state", return_state)
    if not is_causal and (initial_state is not None or return_state):
        raise ValueError(
            "initial_state and return_state carry what came before from one causal call to the "
            "next; they need is_causal=True."
        )


def check_state(state: Any, expected: tuple) -> None:
    """Raises unless `state` is None or a carried state of the kind and shapes of `expected`."""
    if state is None:
        return
    if type(state) is not type(expected):
        raise TypeError(
            f"initial_state must be the {type(expected).__name__} of an earlier call; "
            f"got {type(state).__name__}."
        )
    names = getattr(expected, "_fields")  # noqa: B009
    for name, x, other in zip(names, state, expected, strict=True):
        if jnp.shape(x) != other.shape:
            raise ValueError(
                "initial_state must come from a call of the same shapes and options; its "
                f"{name} is {jnp.shape(x)}, expected {other.shape}."
            )
