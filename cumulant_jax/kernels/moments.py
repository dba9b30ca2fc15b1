"""The two passes of linear-time attention: sum moments over keys, read them out with queries.

Both work head by head on arrays [..., tokens, heads, dim], upcast chunk by chunk, and accumulate in
float32 (float64 for float64 inputs). `features` is one of `features.py` or any hashable function of
that form.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.features import Features, feature_blocks
from cumulant_jax.kernels.token_pass import chunk_length, pull_back_pass, token_pass


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float32, or float64 where an input is float64."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays))


def masked_mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean over the unmasked tokens, zero where there are none.

    Args:
      x: [..., tokens, heads, dim].
      mask: None or bool [..., tokens, heads or 1].

    Returns:
      [..., heads, dim] in the accumulation dtype.
    """
    dtype = accumulation_dtype(x)
    if mask is None:
        return jnp.mean(x, axis=-3, dtype=dtype)
    total = jnp.sum(x, axis=-3, dtype=dtype, where=mask[..., None])
    return total / jnp.maximum(jnp.sum(mask, axis=-2, dtype=dtype), 1)[..., None]


def sum_moments(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
) -> jax.Array:
    """Sums features(key − pivot) ⊗ (value − pivot, 1) over the unmasked tokens.

    With the constant 1 appended to the values, one matrix product yields the mixed moments, the
    sums of the features and, where these hold a constant, the sum of the values and the count.

    Args:
      features: feature map from dim to `features`.
      key: [..., tokens, heads, dim].
      value: [..., tokens, heads, value_dim].
      mask: None or bool [..., tokens, heads or 1]; masked tokens may hold anything, NaN included.
      key_pivot: [..., heads, dim], a vector near the mean, which keeps the sums small. Pivots are
        constants of the differentiation.
      value_pivot: [..., heads, value_dim], likewise.

    Returns:
      [..., heads, features, value_dim + 1] in the accumulation dtype.
    """
    body, chunk = _moments_pass(features, key, value)
    return token_pass(body, chunk, (key, value), mask, (key_pivot, value_pivot))[1]


def sum_moments_backward(
    features: Features,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    key_pivot: jax.Array,
    value_pivot: jax.Array,
    sums_bar: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of key and value, in one pass, from that of what `sum_moments` returned."""
    dtype = accumulation_dtype(key, value)
    body = functools.partial(_moments_backward_body, features, dtype)
    shared = (key_pivot, value_pivot, sums_bar)
    chunk = _chunk(features, key, value.shape[-1], dtype)
    return token_pass(body, chunk, (key, value), mask, shared)[0]


def _moments_pass(features, key, value):
    dtype = accumulation_dtype(key, value)
    body = functools.partial(_moments_body, features, dtype)
    return body, _chunk(features, key, value.shape[-1], dtype)


def read_out(
    features: Features, query: jax.Array, matrix: jax.Array, *, normalizer_eps: float | None = None
) -> jax.Array:
    """Reads moments out with the queries: features(query) @ matrix.

    Args:
      features: feature map from dim to `features`.
      query: [..., tokens, heads, dim].
      matrix: [..., heads or fewer, features, columns]; query heads in equal groups share one.
      normalizer_eps: if given, the last column is a normalizer: the others are divided by it plus
        this constant.

    Returns:
      [..., tokens, heads, columns] (one column fewer with a normalizer) in the matrix's dtype.
    """
    body, chunk, matrix = _read_out_pass(features, query, matrix, normalizer_eps)
    return token_pass(body, chunk, (query,), None, matrix)[0]


def read_out_backward(
    features: Features,
    query: jax.Array,
    matrix: jax.Array,
    *,
    normalizer_eps: float | None = None,
    out_bar: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of query and matrix, in one pass, from that of what `read_out` returned.

    That of the matrix is per query head, [..., query heads, features, columns].
    """
    body, chunk, matrix = _read_out_pass(features, query, matrix, normalizer_eps)
    out_bar = out_bar.astype(matrix.dtype)
    (query_bar,), matrix_bar = pull_back_pass(body, chunk, (query,), None, matrix, out_bar, ())
    return query_bar, matrix_bar


def _read_out_pass(features, query, matrix, normalizer_eps):
    groups = query.shape[-2] // matrix.shape[-3]
    if groups > 1:
        matrix = jnp.repeat(matrix, groups, axis=-3)
    body = functools.partial(_read_out_body, features, normalizer_eps)
    return body, _chunk(features, query, matrix.shape[-1], matrix.dtype), matrix


def _moments_body(features, dtype, tokens, mask, pivots):
    key, value = (
        _head_major(x).astype(dtype) - lax.stop_gradient(pivot)[..., None, :]
        for x, pivot in zip(tokens, pivots, strict=True)
    )
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    if mask is not None:
        mask = jnp.swapaxes(mask, -1, -2)[..., None]
        key, value = jnp.where(mask, key, 0), jnp.where(mask, value, 0)
    return (), jnp.einsum("...tf,...tv->...fv", features(key), value)


def _read_out_body(features, normalizer_eps, tokens, mask, matrix):
    (query,) = tokens
    out = features(_head_major(query).astype(matrix.dtype)) @ matrix
    if normalizer_eps is not None:
        out = out[..., :-1] / (out[..., -1:] + normalizer_eps)
    return _head_major(out), ()


def _moments_backward_body(features, dtype, tokens, mask, shared):
    """By blocks of features: the pull-back of `_moments_body` would put them side by side."""
    *pivots, sums_bar = shared
    key, value = (
        _head_major(x).astype(dtype) - pivot[..., None, :]
        for x, pivot in zip(tokens, pivots, strict=True)
    )
    blocks, pull = jax.vjp(functools.partial(feature_blocks, features), key)
    value_bar, blocks_bar, row = jnp.zeros_like(value), [], 0
    for block in blocks:
        rows = sums_bar[..., row : (row := row + block.shape[-1]), :]
        matrix, column = rows[..., :-1], rows[..., -1]
        value_bar += block @ matrix
        blocks_bar.append(jnp.einsum("...tv,...fv->...tf", value, matrix) + column[..., None, :])
    if row < sums_bar.shape[-2]:  # the features end with a constant
        value_bar += sums_bar[..., row:, :-1]
    (key_bar,) = pull(tuple(blocks_bar))
    bars = [
        _head_major(bar).astype(x.dtype)
        for bar, x in zip((key_bar, value_bar), tokens, strict=True)
    ]
    return tuple(bars if mask is None else (jnp.where(mask[..., None], x, 0) for x in bars)), ()


def _head_major(x: jax.Array) -> jax.Array:
    """[..., tokens, heads, dim] to [..., heads, tokens, dim], and back."""
    return jnp.swapaxes(x, -3, -2)


def _chunk(features: Features, tokens: jax.Array, columns: int, dtype) -> int:
    *batch, length, heads, dim = tokens.shape
    num_features = jax.eval_shape(features, jax.ShapeDtypeStruct((1, dim), dtype)).shape[-1]
    # A symbolic batch, in an exported program, counts as one.
    rows = math.prod(max(size, 1) for size in batch if isinstance(size, int))
    return chunk_length(length, rows * heads * max(num_features, columns, dim) * dtype.itemsize)
