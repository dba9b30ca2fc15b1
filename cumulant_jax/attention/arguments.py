"""Checks of the arguments that the attention functions share, before anything is computed."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LAYOUT = "[*batch, tokens, heads, dim]"
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "float64")))


def check_array(name: str, x: Any, layout: str = _LAYOUT, *, least_rank: int = 3) -> jax.Array:
    """Returns `x` as a floating-point array, or raises an error that names it."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array {layout}; got {type(x).__name__}.")
    if x.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
        raise TypeError(f"{name} must have a floating-point dtype of {known}; got {x.dtype}.")
    if x.ndim < least_rank:
        raise ValueError(f"{name} must be {layout}; got shape {x.shape}.")
    if 0 in x.shape[-least_rank:]:
        raise ValueError(f"{name} must not have an empty tokens, heads or dim axis; got {x.shape}.")
    return jnp.asarray(x)


def check_query_key_value(
    query: Any, key: Any, value: Any, *, is_causal: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks query [*B, T, H, D], key [*B, S, K, D] and value [*B, S, K, Dv]."""
    check_flag("is_causal", is_causal)
    query, key, value = (
        check_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    check_query_key(query, key, is_causal=is_causal)
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            "value must have the batch, tokens and heads of key; "
            f"got value {value.shape} with key {key.shape}."
        )
    return query, key, value


def check_query_key(query: jax.Array, key: jax.Array, *, is_causal: bool = False) -> None:
    """Checks that query [*B, T, H, D] and key [*B, S, K, D] belong together."""
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            "key must have the batch axes of query; "
            f"got query {query.shape} with key {key.shape} (layout {_LAYOUT})."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key must have the dim of query; got query {query.shape} with key {key.shape}."
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "the heads of query must be a multiple of those of key (grouped queries); "
            f"got {query.shape[-2]} and {key.shape[-2]} (layout {_LAYOUT})."
        )
    if is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "is_causal needs as many queries as keys; "
            f"got {query.shape[-3]} queries and {key.shape[-3]} keys."
        )


def check_scale(scale: Any, dim: int) -> float | jax.Array:
    """The factor on query·key: `dim ** -0.5` for None, else a real scalar."""
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        if not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"scale must be finite in float32; got {scale!r:.40}.")
        return float(scale)
    is_scalar = isinstance(scale, (jax.Array, np.ndarray)) and scale.ndim == 0
    if is_scalar and jnp.issubdtype(scale.dtype, jnp.floating):
        return jnp.asarray(scale)
    raise TypeError(f"scale must be None, a number or a 0-d float array; got {scale!r}.")


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Raises a ValueError unless `value` is one of `choices`, and of their type."""
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, and static under jit; got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raises a TypeError unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, and static under jit; got {value!r}.")


def check_positive(name: str, value: Any) -> float:
    """Returns a positive finite number as float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number; got {value!r}.")
    if not (0 < float(value) < math.inf):
        raise ValueError(f"{name} must be positive and finite; got {value!r}.")
    return float(value)


def check_per_head(name: str, x: Any, heads: int) -> jax.Array:
    """Returns a scalar or [heads] parameter as an array [heads]."""
    if not isinstance(x, (jax.Array, np.ndarray, float)):
        raise TypeError(f"{name} must be a float or an array [heads]; got {type(x).__name__}.")
    x = jnp.asarray(x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must have a floating-point dtype; got {x.dtype}.")
    if x.shape not in ((), (heads,)):
        raise ValueError(f"{name} must be a scalar or [heads] = ({heads},); got shape {x.shape}.")
    return jnp.broadcast_to(x, (heads,))
