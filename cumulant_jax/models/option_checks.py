"""Checks that bring a model's options into one form, or say in one line what is wrong with them."""

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from cumulant_jax.models.layers.attention import (
    AttentionKind,
    attention_function,
    attention_kinds,
)
from cumulant_jax.naming import unknown_name

Size = int | tuple[int, int]


def check_count(name: str, value: Any, *, least: int) -> None:
    """Raises TypeError unless value is an integer, and ValueError if it is below `least`.

    >>> check_count("depth", 12, least=1)
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: Any, *, below: float = float("inf")) -> None:
    """Raises unless value is a number with 0 <= value < below.

    >>> check_number("dropout", 0.1, below=1)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < below:
        raise ValueError(f"{name} must be at least 0 and below {below}, got {value}")


def check_name(name: str, value: Any, known: Collection[str]) -> None:
    """Raises ValueError, naming the nearest valid value, unless value is in `known`.

    >>> check_name("pool", "mean", ["token", "mean"])
    """
    if value not in known:
        raise ValueError(unknown_name(name, value, known))


def size_pair(name: str, value: Size) -> tuple[int, int]:
    """(height, width) from a pair or from one number for both.

    >>> size_pair("image_size", 224), size_pair("image_size", (32, 48))
    ((224, 224), (32, 48))
    """
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one number or (height, width), got {value!r}")
    for side in pair:
        check_count(name, side, least=1)
    return pair[0], pair[1]


def dtype_name(name: str, value: Any) -> str:
    """The name of a floating dtype, given as a name, a NumPy dtype or a JAX scalar type.

    >>> dtype_name("dtype", jnp.bfloat16)
    'bfloat16'
    """
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        message = f"{name} must be a floating dtype such as 'float32' or 'bfloat16', got {value!r}"
        raise ValueError(message) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating dtype such as 'bfloat16', got {dtype.name!r}")
    return dtype.name


def per_block(name: str, value: Any, depth: int) -> Any:
    """A value for all blocks as it is, a list as a tuple of one value for each block.

    >>> per_block("attention", ["softmax", "tssa"], 2)
    ('softmax', 'tssa')
    """
    if not isinstance(value, list | tuple):
        return value
    if len(value) != depth:
        raise ValueError(
            f"{name} has {len(value)} entries and the model has depth {depth}: give one for "
            "each block, or a single one for all"
        )
    return tuple(value)


def check_attention(kind: AttentionKind) -> None:
    """Raises unless kind is a known name or a function.

    >>> check_attention("cumulant3")
    """
    if isinstance(kind, str):
        check_name("attention", kind, attention_kinds())
    elif isinstance(kind, nnx.Module) or not callable(kind):
        raise TypeError(
            "attention must be a name, a function (query, key, value, **options) without "
            f"parameters of its own, or a sequence of those, got {kind!r}"
        )


def check_attention_options(kind: AttentionKind, options: Mapping[str, Any]) -> None:
    """Raises TypeError unless the kind's function takes these options and all are hashable.

    >>> check_attention_options("cumulant3", {"reduction": "sum"})
    """
    function = attention_function(kind)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    fixed = {*fixed, "temperature"}  # the layers that have a temperature learn it
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    for name, value in options.items():
        if not takes_any and name not in known:
            label = kind if isinstance(kind, str) else getattr(kind, "__name__", "this function")
            raise TypeError(unknown_name(f"attention option of {label}", name, known))
        if getattr(type(value), "__hash__", None) is None:
            raise TypeError(
                f"attention option {name} is a {type(value).__name__}; only hashable values "
                "(numbers, names, tuples) can be part of a model"
            )
