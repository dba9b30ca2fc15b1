"""Cross-covariance attention (XCiT): softmax attention over features instead of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.masks import token_mask
from cumulant_jax.kernels import accumulation_dtype, choose_implementation

_ENERGY_FLOOR = 1e-24


def cross_covariance_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    temperature: jax.Array | float,
    mask: jax.Array | None = None,
    seq_lengths: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of features to features, from the cross-covariance of queries and keys.

    With q̂, k̂ the queries and keys scaled to unit norm over the tokens, feature by feature,

      A[i, j]   = softmax over j of temperature_h · Σ_n q̂[n, i] k̂[n, j]
      out[n, i] = Σ_j A[i, j] v[n, j]

    Args:
      query: [*batch, T, H, D]; the same tokens as the keys.
      key: [*batch, T, K, Dk]; H is a multiple of K.
      value: [*batch, T, K, Dk].
      temperature: [H] or a scalar, learned.
      mask: boolean [*batch, T], True = the token takes part. Masked tokens may hold anything, NaN
        included; their outputs are zero.
      seq_lengths: int [*batch]; tokens at and beyond the length are masked.
      implementation: None (the best for this device) or "xla".

    Returns:
      [*batch, T, H, D] in the dtype of `value`.

    Raises:
      ValueError: shapes do not fit.
      TypeError: an argument has the wrong type or dtype.
      NotImplementedError: the named implementation cannot do this.

    Source:
      El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", equation 2.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> cross_covariance_attention(q, k, v, temperature=1.0).shape
      (2, 100, 4, 16)
    """
    query, key, value = arguments.check_query_key_value(query, key, value)
    if query.shape[-3] != key.shape[-3] or value.shape[-1] != key.shape[-1]:
        raise ValueError(
            "cross-covariance attention is self-attention over features: query and key need the "
            "same tokens, and value the dim of key; "
            f"got query {query.shape}, key {key.shape}, value {value.shape}."
        )
    heads = query.shape[-2]
    temperature = arguments.check_per_head("temperature", temperature, heads)
    choose_implementation(implementation, "cross_covariance_attention")
    mask = token_mask(mask, seq_lengths, query.shape[:-3], query.shape[-3])

    dtype, work = value.dtype, accumulation_dtype(query, key, value)
    query, key, value = (x.astype(work) for x in (query, key, value))
    if mask is not None:
        query, key, value = (jnp.where(mask[..., None, None], x, 0) for x in (query, key, value))
    key, value = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (key, value))
    logits = jnp.einsum("...thi,...thj->...hij", _unit_norm(query), _unit_norm(key))
    temperature = temperature.astype(work).reshape(*(1,) * (logits.ndim - 3), heads, 1, 1)
    weights = jax.nn.softmax(temperature * logits, axis=-1)
    return jnp.einsum("...hij,...thj->...thi", weights, value).astype(dtype)


def _unit_norm(x: jax.Array) -> jax.Array:
    """Scales every feature to unit norm over the tokens; zero features stay zero."""
    energy = jnp.sum(x * x, axis=-3, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(energy, _ENERGY_FLOOR))
