"""Linear attention, the kernel-feature baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.masks import key_mask
from cumulant_jax.kernels import choose_implementation, elu1, read_out, sum_moments
from cumulant_jax.naming import unknown_name


def _identity(x: jax.Array) -> jax.Array:
    return x


FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu1": elu1,
    "relu": jax.nn.relu,
    "exp": jnp.exp,
}


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
    implementation: str | None = None,
    feature_map: str | Callable[[jax.Array], jax.Array] = "elu1",
    eps: float = 1e-6,
    initial_state: Any = None,
    return_state: bool = False,
) -> jax.Array:
    """Attention with the kernel φ(q)·φ(k) in place of exp(q·k).

      out = φ(q) Σ_l φ(k_l) v_lᵀ / (φ(q)·Σ_l φ(k_l) + eps)

    Args:
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      value: [*batch, S, K, Dv].
      mask: boolean, True = attend; [*batch, S], or anything that broadcasts to [*batch, H, T, S]
        and does not depend on the query. Masked keys and values may hold anything, NaN included.
      key_value_seq_lengths: int [*batch]; keys at and beyond the length are masked.
      is_causal: not available for this function yet.
      scale: factor on the queries before φ; None for D ** -0.5.
      implementation: None (the best for this device) or "xla".
      feature_map: "elu1" (elu + 1), "relu", "exp", or a function from [..., dim] to
        [..., features] with non-negative results.
      eps: added to the denominator.
      initial_state: belongs to causal attention, not available yet.
      return_state: likewise.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`; zeros where every key is masked.

    Raises:
      ValueError: shapes or options do not fit, or the mask depends on the query.
      TypeError: an argument has the wrong type or dtype.
      NotImplementedError: what was asked for is not available in the implementation.

    Source:
      Katharopoulos et al., "Transformers are RNNs", equation 5 (elu + 1: equation 7).

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> linear_attention(q, k, v).shape
      (2, 100, 4, 16)
    """
    query, key, value = arguments.check_query_key_value(query, key, value, is_causal=is_causal)
    eps = arguments.check_positive("eps", eps)
    feature_function = check_feature_map(feature_map)
    choose_implementation(implementation, "linear_attention")
    arguments.refuse_state(
        "linear_attention",
        initial_state=initial_state,
        return_state=return_state,
        is_causal=is_causal,
    )
    scale = arguments.check_scale(scale, query.shape[-1])
    mask = key_mask(
        mask,
        key_value_seq_lengths,
        batch=query.shape[:-3],
        heads=query.shape[-2],
        queries=query.shape[-3],
        keys=key.shape[-3],
        operation="linear_attention",
    )
    key, value = arguments.spread_heads(key, value, mask)

    query = query * jnp.asarray(scale, jnp.result_type(query, jnp.float32))
    if not isinstance(feature_map, str):
        # A function of the caller's may hold traced values, which cannot enter the custom
        # derivative of the passes: it is applied here, at the price of one more array.
        key = _apply_to_unmasked(feature_map, key, mask)
        query, feature_function = feature_map(query), _identity
    zero = jnp.zeros((), key.dtype)
    sums = sum_moments(
        feature_function,
        key,
        value,
        mask,
        key_pivot=jnp.broadcast_to(zero, (*key.shape[:-3], *key.shape[-2:])),
        value_pivot=jnp.broadcast_to(zero, (*value.shape[:-3], *value.shape[-2:])),
    )
    out = read_out(feature_function, query, sums, normaliser_eps=eps)
    return out.astype(value.dtype)


def check_feature_map(feature_map: Any) -> Callable[[jax.Array], jax.Array]:
    """Resolves the `feature_map` argument."""
    if not isinstance(feature_map, str):
        if not callable(feature_map):
            raise TypeError(f"feature_map must be a name or a function; got {feature_map!r}.")
        return cast(Callable[[jax.Array], jax.Array], feature_map)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(unknown_name("feature_map", feature_map, FEATURE_MAPS))
    return FEATURE_MAPS[feature_map]


def _apply_to_unmasked(feature_map, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    key = key.astype(jnp.result_type(key, jnp.float32))
    if mask is not None:
        key = jnp.where(mask[..., None], key, 0)
    return feature_map(key)
