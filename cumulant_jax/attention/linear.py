"""Linear attention, the kernel-feature baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.linear_time import check_state, prepare
from cumulant_jax.kernels import (
    MomentState,
    NormalizedReading,
    accumulation_dtype,
    causal_attention,
    elu1,
    moment_attention,
    state_shapes,
)
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
    initial_state: MomentState | None = None,
    return_state: bool = False,
) -> Any:
    """Attention with the kernel φ(q)·φ(k) in place of exp(q·k).

      out = φ(q) Σ_l φ(k_l) v_lᵀ / (φ(q)·Σ_l φ(k_l) + eps)

    Args:
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      value: [*batch, S, K, Dv].
      mask: boolean, True = attend; [*batch, S], or anything that broadcasts to [*batch, H, T, S]
        and does not depend on the query. Masked keys and values may hold anything, NaN included.
      key_value_seq_lengths: int [*batch]; keys at and beyond the length are masked.
      is_causal: query t attends to keys up to t, in linear time too.
      scale: factor on the queries before φ; None for D ** -0.5.
      implementation: None (the best for this device), "xla", "mosaic_gpu" or "mosaic_tpu".
      feature_map: "elu1" (elu + 1), "relu", "exp", or a function from [..., dim] to
        [..., features] with non-negative results.
      eps: added to the denominator.
      initial_state: with is_causal, what an earlier call returned: its tokens come before these.
      return_state: with is_causal, whether to return the state after the last token as well.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`; zeros where every key is masked. With
      `return_state` a pair of that and a `MomentState`.

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
    eps = arguments.check_positive("eps", eps)
    feature_function = check_feature_map(feature_map)
    query, key, value, mask, scale, dtype = prepare(
        "linear_attention",
        query,
        key,
        value,
        mask=mask,
        key_value_seq_lengths=key_value_seq_lengths,
        is_causal=is_causal,
        scale=scale,
        implementation=implementation,
        initial_state=initial_state,
        return_state=return_state,
    )
    query = (query * jnp.asarray(scale, accumulation_dtype(query))).astype(query.dtype)
    if not isinstance(feature_map, str):
        # A function of the caller's may hold traced values, which cannot enter the custom
        # derivative of the passes: it is applied here, at the price of one more array.
        if mask is not None:
            key = jnp.where(mask[..., None], key, 0)
        query, key = (_apply(feature_map, x.astype(query.dtype)) for x in (query, key))
        feature_function = _identity
    reading = NormalizedReading(feature_function, normalizer_eps=eps)
    options: Any = {
        "scale": 1.0,
        "operation": "linear_attention",
        "implementation": implementation,
    }
    if is_causal:
        check_state(initial_state, state_shapes(reading, key, value))
        out, state = causal_attention(reading, query, key, value, mask, initial_state, **options)
        return (out.astype(dtype), state) if return_state else out.astype(dtype)
    return moment_attention(reading, query, key, value, mask, **options).astype(dtype)


def check_feature_map(feature_map: Any) -> Callable[[jax.Array], jax.Array]:
    """Resolves the `feature_map` argument."""
    if not isinstance(feature_map, str):
        if not callable(feature_map):
            raise TypeError(f"feature_map must be a name or a function; got {feature_map!r}.")
        return cast(Callable[[jax.Array], jax.Array], feature_map)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(unknown_name("feature_map", feature_map, FEATURE_MAPS))
    return FEATURE_MAPS[feature_map]


def _apply(feature_map: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    features = feature_map(x)
    if not isinstance(features, jax.Array) or features.shape[:-1] != x.shape[:-1]:
        shape = getattr(features, "shape", type(features).__name__)
        raise ValueError(
            f"feature_map must map [..., dim] to [..., features] and keep the other axes: it made "
            f"{shape} of {x.shape}."
        )
    return features
