"""Softmax attention, the exact quadratic-time reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.masks import full_mask
from cumulant_jax.kernels import choose_implementation


def softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention through `jax.nn.dot_product_attention`.

    It differs from that function where a mask leaves a query no key (the output is zero, not an
    average), and in that keys which no query may attend to can hold anything, NaN included.

    Args:
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      value: [*batch, S, K, Dv].
      mask: boolean, True = attend; [*batch, S], or anything that broadcasts to [*batch, H, T, S].
      key_value_seq_lengths: int [*batch]; keys at and beyond the length are masked.
      is_causal: query t attends to keys up to t.
      scale: factor on query·key; None for D ** -0.5.
      implementation: None (the best for this device), "xla", or "cudnn" (NVIDIA GPUs).

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`; zeros where every key is masked.

    Raises:
      ValueError: shapes or options do not fit.
      TypeError: an argument has the wrong type or dtype.
      NotImplementedError: the named implementation cannot do this.

    Source:
      Vaswani et al., "Attention Is All You Need", equation 1.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> softmax_attention(q, k, v, is_causal=True).shape
      (2, 100, 4, 16)
    """
    query, key, value = arguments.check_query_key_value(query, key, value, is_causal=is_causal)
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("implementation='cudnn' needs an NVIDIA GPU; use None or 'xla'.")
    if implementation not in (None, "cudnn"):
        implementation = choose_implementation(implementation, "softmax_attention")
    scale = arguments.check_scale(scale, query.shape[-1])
    batch, (queries, heads, _), keys = query.shape[:-3], query.shape[-3:], key.shape[-3]
    mask = full_mask(
        mask, key_value_seq_lengths, batch=batch, heads=heads, queries=queries, keys=keys
    )
    value_dim, dtype = value.shape[-1], value.dtype
    if mask is not None:
        key, value = _drop_unused(key, value, mask)
    work = _working_dtype(jnp.result_type(query, key, value))
    query, key, value = (x.astype(work) for x in (query, key, value))
    query, key, value = _equal_dims(query, key, value)
    attend: Any = _float64_attention if work == jnp.float64 else jax.nn.dot_product_attention
    out = attend(
        *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
        mask=None if mask is None else mask.reshape(-1, *mask.shape[-3:]),
        scale=scale,
        is_causal=is_causal,
        implementation=implementation,
    )
    out = out.reshape(*batch, *out.shape[-3:])[..., :value_dim]
    if mask is not None:
        out = jnp.where(_attended(mask, is_causal, queries), out, 0)
    return out.astype(dtype)


def _working_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32 for float16 off the GPU: no other backend multiplies float16 into float32."""
    if dtype == jnp.float16 and jax.default_backend() != "gpu":
        return jnp.dtype(jnp.float32)
    return dtype


def _float64_attention(query, key, value, *, mask, scale, is_causal, implementation) -> jax.Array:
    """The same on [B, tokens, heads, dim] in float64; `jax.nn` takes its softmax in float32."""
    if implementation == "cudnn":
        raise NotImplementedError("implementation='cudnn' has no float64; use None or 'xla'.")
    batch, queries, heads, dim = query.shape
    grouped = query.reshape(batch, queries, key.shape[-2], -1, dim)
    logits = scale * jnp.einsum("btkgd,bskd->bkgts", grouped, key)
    logits = logits.reshape(batch, heads, queries, -1)
    if is_causal:
        causal = _lower_triangle(queries, 4)
        mask = causal if mask is None else mask & causal
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min / 2)
    weights = jax.nn.softmax(logits, axis=-1).reshape(batch, key.shape[-2], -1, *logits.shape[-2:])
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)


def _drop_unused(key: jax.Array, value: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeroes the keys and values that no query of their head group attends to."""
    used = jnp.swapaxes(mask.any(axis=-2), -1, -2)
    if used.shape[-1] != 1:
        groups = used.shape[-1] // key.shape[-2]
        used = used.reshape(*used.shape[:-1], key.shape[-2], groups).any(axis=-1)
    return jnp.where(used[..., None], key, 0), jnp.where(used[..., None], value, 0)


def _attended(mask: jax.Array, is_causal: bool, queries: int) -> jax.Array:
    """Whether a query has a key left, [*batch, queries or 1, heads or 1, 1]."""
    if is_causal:
        mask = mask & _lower_triangle(queries, mask.ndim)
    return jnp.swapaxes(mask.any(axis=-1), -1, -2)[..., None]


def _lower_triangle(queries: int, ndim: int) -> jax.Array:
    triangle = jnp.tril(jnp.ones((queries, queries), bool))
    return triangle.reshape(*(1,) * (ndim - 2), queries, queries)


def _equal_dims(query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pads with zeros to one dim, as `jax.nn.dot_product_attention` wants."""
    dim = max(query.shape[-1], value.shape[-1])

    def pad(x):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, dim - x.shape[-1])])

    return pad(query), pad(key), pad(value)
