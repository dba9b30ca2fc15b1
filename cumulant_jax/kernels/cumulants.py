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
        weight = jnp.asarray(multiplicity, raw.dtype)[:, None]
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
