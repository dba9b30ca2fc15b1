"""The attention kinds by name, for configurations and for other people's modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from cumulant_jax.attention.cumulant import cumulant_attention
from cumulant_jax.attention.linear import linear_attention
from cumulant_jax.attention.softmax import softmax_attention
from cumulant_jax.naming import unknown_name

KINDS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "softmax": softmax_attention,
        "linear": linear_attention,
        "cumulant2": functools.partial(cumulant_attention, order=2),
        "cumulant3": functools.partial(cumulant_attention, order=3),
        "cumulant3_full": functools.partial(cumulant_attention, order=3, offdiagonal=True),
        "cumulant4": functools.partial(cumulant_attention, order=4),
    }
)


def attention(
    kind: str, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> jax.Array:
    """Calls the attention function of a kind.

    Args:
      kind: "softmax", "linear", "cumulant2", "cumulant3", "cumulant3_full" or "cumulant4".
      query: [*batch, T, H, D].
      key: [*batch, S, K, D].
      value: [*batch, S, K, Dv].
      **options: keyword arguments of that function, such as `mask` or `scale`.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`.

    Raises:
      ValueError: the kind is unknown.
      TypeError: the kind has no such option.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> attention("cumulant3", q, k, v, reduction="sum").shape
      (2, 100, 4, 16)
    """
    function = attention_function(kind)
    check_options(kind, options)
    return function(query, key, value, **options)


def attention_function(kind: str) -> Callable[..., jax.Array]:
    """The function behind a kind, or a ValueError with the nearest name."""
    if not isinstance(kind, str) or kind not in KINDS:
        elsewhere = "In models also tssa, mssa and xca, which bring their own projections."
        raise ValueError(unknown_name("attention kind", kind, KINDS, remedy=elsewhere))
    return KINDS[kind]


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raises a TypeError that names an option which the kind does not have."""
    function = attention_function(kind)
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    for name in options:
        if name not in known:
            raise TypeError(unknown_name(f"option of {kind} attention", name, known))


def as_flax_attention_fn(kind: str, **options: Any) -> Callable[..., jax.Array]:
    """Makes an `attention_fn` for `flax.nnx.MultiHeadAttention` and the linen one.

    Args:
      kind: a name from `KINDS`.
      **options: keyword arguments of that kind's function.

    Returns:
      A function of Flax's signature. It raises a ValueError for what the kind cannot do: attention
      dropout, a bias, sown weights, or (linear-time kinds) a mask that depends on the query.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=as_flax_attention_fn("cumulant3"))
      >>> layer(jax.numpy.ones((2, 100, 32))).shape
      (2, 100, 32)
    """
    function = attention_function(kind)
    check_options(kind, options)

    # Linen passes only the arguments that the signature names, so all are named.
    def attention_fn(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        is_causal=False,
    ):
        del broadcast_dropout, dropout_rng
        _refuse(kind, "a bias", bias is not None)
        _refuse(kind, "attention dropout", dropout_rate > 0 and not deterministic)
        _refuse(kind, "sown attention weights", module is not None)
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        if mask is not None:
            mask = mask.astype(bool)
        with _matmul_precision(precision):
            return function(query, key, value, mask=mask, is_causal=is_causal, **options)

    return attention_fn


def _matmul_precision(precision: Any):
    """A context for the precisions that Flax takes: None, a name, a `jax.lax.Precision`, a pair."""
    if isinstance(precision, tuple):
        if len(set(precision)) != 1:
            raise ValueError(f"precision must be the same for both operands; got {precision}.")
        precision = precision[0]
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(str(getattr(precision, "name", precision)).lower())


def _refuse(kind: str, what: str, asked: bool) -> None:
    if asked:
        raise ValueError(f"{kind!r} attention inside Flax's MultiHeadAttention has no {what}.")
