"""Checks that bring a model's options into one form, or say in one line what is wrong with them."""

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cumulant_jax.attention import KINDS, check_options
from cumulant_jax.models.layers.attention import (
    AttentionKind,
    attention_kinds,
    layer_function,
)
from cumulant_jax.naming import unknown_name

Size = int | tuple[int, int]


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless value is True or False: a text such as "no" would count as true.

    >>> check_flag("remat", True)
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


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

    A value that is no text at all is a TypeError.

    >>> check_name("pool", "mean", ["token", "mean"])
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(sorted(known))}, got {value!r}")
    if value not in known:
        raise ValueError(unknown_name(name, value, known))


def size_pair(name: str, value: Size) -> tuple[int, int]:
    """(height, width) from a pair or from one number for both.

    >>> size_pair("image_size", 224), size_pair("image_size", (32, 48))
    ((224, 224), (32, 48))
    """
    pair: tuple[Any, ...] = (value, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        pair = tuple(value)
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
    message = f"{name} must be a floating dtype such as 'float32' or 'bfloat16', got {value!r}"
    if value is None:  # to NumPy it means float64
        raise ValueError(message)
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError) as error:
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
    elif isinstance(kind, nnx.Module) or not callable(kind) or not _is_hashable(kind):
        raise TypeError(
            "attention must be a name, a function (query, key, value, **options) without "
            f"parameters of its own, or a sequence of those, got {kind!r}"
        )


def options_mapping(name: str, value: Any) -> dict[str, Any]:
    """Keyword arguments as a dict, an empty one for None.

    >>> options_mapping("attention_options", None)
    {}
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name} must be a mapping of option names to values such as {{'scale': 0.5}}, or a "
            f"list of one for each block, got {value!r}"
        )
    return dict(value)


def check_attention_options(kind: AttentionKind, options: Mapping[str, Any]) -> None:
    """Raises TypeError unless the kind's function takes these options and all are hashable.

    >>> check_attention_options("cumulant3", {"reduction": "sum"})
    """
    if isinstance(kind, str) and kind in KINDS:
        check_options(kind, options)
    else:
        _check_keywords(kind, options)
    for name, value in options.items():
        if not _is_hashable(value):
            raise TypeError(
                f"attention option {name} is a {type(value).__name__}; only hashable values "
                "(numbers, names, tuples) can be part of a model"
            )


def _check_keywords(kind: AttentionKind, options: Mapping[str, Any]) -> None:
    """`check_options` for what is no kind of `KINDS`: a kind with its own layer, or a function."""
    function = layer_function(kind)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    fixed = {*fixed, "temperature"}  # the layers that have a temperature learn it
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    for name in options:
        if name not in known:
            label = kind if isinstance(kind, str) else getattr(kind, "__name__", "this function's")
            raise TypeError(unknown_name(f"option of {label} attention", name, known))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_rngs(rngs: Any) -> None:
    """Raises TypeError unless rngs can give the keys of the initialisation.

    >>> check_rngs(nnx.Rngs(0))
    """
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be an nnx.Rngs, such as nnx.Rngs(0), got {type(rngs).__name__}")
    if "params" not in rngs and "default" not in rngs:
        streams = ", ".join(name for name, _ in rngs.items()) or "none"
        raise TypeError(
            "rngs must have a stream 'params' or a default one, such as nnx.Rngs(0) or "
            f"nnx.Rngs(params=0), got the streams: {streams}"
        )


def check_key(name: str, value: Any) -> None:
    """Raises TypeError unless value is one random key, typed or of the old uint32 form.

    >>> check_key("rng", jax.random.key(0))
    >>> check_key("rng", jax.random.PRNGKey(0))
    """
    message = f"{name} must be one JAX random key, such as jax.random.key(0), got "
    if not isinstance(value, jax.Array):
        raise TypeError(message + type(value).__name__)
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if typed and value.ndim:
        raise TypeError(f"{message}an array {value.shape} of keys")
    if not typed:
        try:
            wrapped = jax.random.wrap_key_data(value)
        except TypeError:
            wrapped = None
        if wrapped is None or wrapped.ndim:
            raise TypeError(f"{message}{value.dtype} {list(value.shape)}")
