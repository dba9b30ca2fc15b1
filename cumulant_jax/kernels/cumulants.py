"""From raw moments about a pivot to the read-out matrix of the cumulant expansion.

This is small algebra per head, whatever the number of tokens. It is exact for any pivot; rounding
is harmless while the pivot is within about a standard deviation of the mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.features import PolynomialFeatures


def read_out_matrix(
    features: PolynomialFeatures,
    sums: jax.Array,
    value_pivot: jax.Array,
    *,
    dim: int,
    scale: float | jax.Array,
    reduction_is_sum: bool,
) -> jax.Array:
    """Turns sums of raw moments into the matrix that `read_out` multiplies the query features by.

    Writing x = κ + X for a key about the pivot (X its mean) and y for a value, the centred moments
    follow from the raw ones:
      E[κ_i ν]      = E[x_i y] − X_i Y
      E[κ_i κ_j ν]  = E[x_i x_j y] − X_i E[x_j y] − X_j E[x_i y] − E[x_i x_j] Y + 2 X_i X_j Y
      E[κ_i³ ν]     = E[x_i³ y] − 3 X_i E[x_i² y] + 3 X_i² E[x_i y] − X_i³ Y
                      − (E[x_i³] − 3 X_i E[x_i²] + 2 X_i³) Y

    Args:
      features: the monomials that were summed.
      sums: [..., heads, features, value_dim + 1] from `sum_moments`.
      value_pivot: [..., heads, value_dim].
      dim: key dimension.
      scale: factor on the queries.
      reduction_is_sum: multiply by the number of tokens, the paper's literal form.

    Returns:
      [..., heads, features, value_dim].
    """
    count = sums[..., -1:, -1:]
    raw = sums / jnp.maximum(count, 1)
    mean_value = raw[..., -1:, :-1]
    blocks = [_centre_constant(mean_value, value_pivot, count)]
    order = features.order
    if order >= 2:
        mean, first = raw[..., :dim, -1:], raw[..., :dim, :-1]
        covariance = first - mean * mean_value
        blocks.append(scale * covariance)
    if order >= 3:
        i, j, multiplicity = features.pair_indices(dim)
        second = raw[..., dim : dim + i.size, :-1]
        squares = raw[..., dim : dim + i.size, -1:]
        xi, xj = mean[..., i, :], mean[..., j, :]
        third = second - xi * first[..., j, :] - xj * first[..., i, :]
        third = third - (squares - 2 * xi * xj) * mean_value
        weight = jnp.asarray(multiplicity, raw.dtype)
        weight = weight.reshape(*(1,) * (third.ndim - 2), i.size, 1)
        blocks.append(scale**2 / 2 * weight * third)
    if order >= 4:
        cubed, cubes = raw[..., 2 * dim : 3 * dim, :-1], raw[..., 2 * dim : 3 * dim, -1:]
        fourth = cubed - 3 * mean * second + 3 * mean**2 * first - mean**3 * mean_value
        fourth = fourth - (cubes - 3 * mean * squares + 2 * mean**3) * mean_value
        variance = squares - mean**2
        blocks.append(scale**3 / 6 * (fourth - 3 * variance * covariance))
    matrix = jnp.concatenate([*blocks[1:], blocks[0]], axis=-2)
    return matrix * count if reduction_is_sum else matrix


def _centre_constant(mean_value: jax.Array, value_pivot: jax.Array, count: jax.Array) -> jax.Array:
    """The mean of the values, zero where every token is masked."""
    return jnp.where(count > 0, mean_value + value_pivot[..., None, :], 0)


def effective_features(
    features: PolynomialFeatures,
    query: jax.Array,
    means: jax.Array,
    *,
    dim: int,
    scale: float | jax.Array,
) -> jax.Array:
    """What multiplies the mean raw moments to give the expansion at a query.

    The expansion is linear in the moments that hold values, so the algebra of `read_out_matrix` can
    be put on the side of the query instead: `effective_features(…) @ raw` equals
    `features(query) @ read_out_matrix(…)`. That serves where every query has moments of its own, as
    in causal attention: only the means of the key features, not the matrices, are needed per token.

    Args:
      features: the monomials.
      query: [..., tokens, dim].
      means: [..., tokens, features], the means of the key features about the pivot.
      dim: key dimension.
      scale: factor on the queries.

    Returns:
      [..., tokens, features].
    """
    query = scale * query
    mean = means[..., :dim]
    if features.order == 1:
        return jnp.ones_like(query[..., :1])
    linear = query
    constant = 1 - jnp.sum(query * mean, axis=-1, keepdims=True)
    blocks = []
    if features.order >= 3:
        i, _, multiplicity = features.pair_indices(dim)
        squares = means[..., dim : dim + i.size]
        weight = jnp.asarray(multiplicity / 2, query.dtype)
        pairs = features.pairs(query) * weight.reshape(*(1,) * (query.ndim - 1), i.size)
        if features.all_pairs:
            along = jnp.sum(query * mean, axis=-1, keepdims=True)
            linear, constant = linear - query * along, constant + along**2
        else:
            linear = linear - query**2 * mean
            constant = constant + jnp.sum((query * mean) ** 2, axis=-1, keepdims=True)
        constant = constant - jnp.sum(pairs * squares, axis=-1, keepdims=True)
        blocks = [pairs]
    if features.order >= 4:
        cubes, third = means[..., 2 * dim : 3 * dim], query**3 / 6
        blocks = [blocks[0] - 3 * third * mean, third]
        linear = linear + 3 * third * (2 * mean**2 - squares)
        per_dim = third * (6 * mean * squares - 6 * mean**3 - cubes)
        constant = constant + jnp.sum(per_dim, axis=-1, keepdims=True)
    return jnp.concatenate([linear, *blocks, constant], axis=-1)
