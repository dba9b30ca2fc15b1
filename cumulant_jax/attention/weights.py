"""Attention weights as an array, for looking at and for tests; quadratic in the tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.cumulant import check_cumulant_options
from cumulant_jax.attention.linear import check_feature_map
from cumulant_jax.attention.masks import full_mask
from cumulant_jax.kernels import accumulation_dtype
from cumulant_jax.naming import unknown_name


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    *,
    kind: str = "cumulant",
    mask: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
    order: int = 3,
    offdiagonal: bool = False,
    reduction: str = "mean",
    feature_map: str | Callable[[jax.Array], jax.Array] = "elu1",
    eps: float = 1e-6,
) -> jax.Array:
    """The weight of every key for every query: the attention output is weights @ value.

    For "cumulant" these are effective weights,

      w_l = (1/n) (1 + a_l + ½ Σ_i q_i² (κ_li² − E[κ_i²])
                   + (1/6) Σ_i q_i³ (κ_li³ − E[κ_i³] − 3 E[κ_i²] κ_li))

    with a_l = q·κ_l. They sum to 1 over the keys (to the number of keys with reduction="sum") and
    may be negative.

    Args:
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      kind: "cumulant", "softmax" or "linear".
      mask: as for the attention function of that kind.
      key_value_seq_lengths: int [*batch].
      is_causal: query t attends to keys up to t; for "softmax".
      scale: factor on the queries; None for D ** -0.5.
      order: for "cumulant".
      offdiagonal: for "cumulant".
      reduction: for "cumulant".
      feature_map: for "linear".
      eps: for "linear".

    Returns:
      [*batch, H, T, S], float32 (float64 for float64 inputs); zeros for masked keys.

    Raises:
      ValueError: shapes or options do not fit.
      TypeError: an argument has the wrong type or dtype.

    Example:
      >>> import jax
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 2, 7, 4, 16))
      >>> weights = attention_weights(q, k, kind="cumulant", order=3)
      >>> weights.shape, bool(jax.numpy.allclose(weights.sum(-1), 1, atol=1e-5))
      ((2, 4, 7, 7), True)
    """
    query, key = arguments.check_array("query", query), arguments.check_array("key", key)
    arguments.check_flag("is_causal", is_causal)
    arguments.check_query_key(query, key, is_causal=is_causal)
    if not isinstance(kind, str) or kind not in _WEIGHTS:
        raise ValueError(unknown_name("kind", kind, _WEIGHTS))
    check_cumulant_options(order, offdiagonal, reduction)
    eps = arguments.check_positive("eps", eps)
    if is_causal and kind != "softmax":
        raise NotImplementedError(f"attention_weights of kind {kind!r} has no is_causal=True yet.")
    scale = arguments.check_scale(scale, query.shape[-1])
    queries, keys, heads = query.shape[-3], key.shape[-3], query.shape[-2]
    mask = full_mask(
        mask,
        key_value_seq_lengths,
        batch=query.shape[:-3],
        heads=heads,
        queries=queries,
        keys=keys,
    )
    if mask is None:
        mask = jnp.ones((*(1,) * (query.ndim - 1), keys), bool)
    if is_causal:
        causal = jnp.tril(jnp.ones((queries, keys), bool))
        mask = mask & causal.reshape(*(1,) * (mask.ndim - 2), queries, keys)
    if kind != "softmax" and mask.shape[-2] != 1:
        raise ValueError(f"mask of kind {kind!r} must not depend on the query; got {mask.shape}.")
    work = accumulation_dtype(query, key)
    # To [*batch, heads, tokens, dim], with one key head per query head and masked keys zeroed.
    key = jnp.swapaxes(jnp.repeat(key.astype(work), heads // key.shape[-2], axis=-2), -3, -2)
    key = jnp.where(mask.any(axis=-2)[..., None], key, 0)
    query = jnp.swapaxes(query.astype(work) * scale, -3, -2)
    options = {"order": order, "offdiagonal": offdiagonal, "reduction": reduction}
    options |= {"feature_map": feature_map, "eps": eps}
    return _WEIGHTS[kind](query, key, mask, **options)


def _softmax_weights(query, key, mask, **_):
    logits = jnp.where(mask, query @ jnp.swapaxes(key, -1, -2), -jnp.inf)
    highest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(logits.dtype).min)
    weights = jnp.exp(logits - jax.lax.stop_gradient(highest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def _linear_weights(query, key, mask, *, feature_map, eps, **_):
    feature_map = check_feature_map(feature_map)
    weights = feature_map(query) @ jnp.swapaxes(feature_map(key), -1, -2)
    weights = jnp.where(mask, weights, 0)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + eps)


def _cumulant_weights(query, key, mask, *, order, offdiagonal, reduction, **_):
    present = mask[..., 0, :, None]
    count = jnp.maximum(jnp.sum(present, axis=-2, keepdims=True), 1).astype(key.dtype)

    def mean(x):
        return jnp.sum(x, axis=-2, keepdims=True, where=present) / count

    centred = key - mean(key)
    centred = jnp.where(present, centred - mean(centred), 0)
    variance = mean(centred**2)
    projection = query @ jnp.swapaxes(centred, -1, -2)
    weights = jnp.ones_like(projection)
    if order >= 2:
        weights += projection
    if order >= 3 and offdiagonal:
        squares = projection**2
        total = jnp.sum(squares, axis=-1, keepdims=True, where=mask)
        weights += (squares - total / count) / 2
    elif order >= 3:
        weights += query**2 @ jnp.swapaxes(centred**2 - variance, -1, -2) / 2
    if order >= 4:
        cubes = centred**3 - mean(centred**3) - 3 * variance * centred
        weights += query**3 @ jnp.swapaxes(cubes, -1, -2) / 6
    weights = jnp.where(mask, weights, 0)
    return weights if reduction == "sum" else weights / count


_WEIGHTS = {"softmax": _softmax_weights, "linear": _linear_weights, "cumulant": _cumulant_weights}
