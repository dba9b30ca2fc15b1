"""The algebra of `kernels.cumulants`, diagonal terms, for groups of heads inside a kernel.

There a matrix has features on rows and values on columns, one head at a time; here it is transposed
and block-diagonal. The formulas are the same; the tests compare the two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.mosaic_tpu.body import Moments, ReadOut
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout


def cumulant_weights(
    degree: int,
    layout: HeadLayout,
    moments: Moments,
    key_count: float | jax.Array,
    value_count: float | jax.Array,
    value_pivot: jax.Array,
    scale: jax.Array,
    *,
    reduction_is_sum: bool,
) -> ReadOut:
    """From raw moments about the pivots to what multiplies the query features.

    Args:
      degree: the order of the expansion minus 1.
      layout: how heads are packed.
      moments: of one group.
      key_count: number of tokens, or [1, lanes] where it differs between heads.
      value_count: likewise, or [1, value_lanes].
      value_pivot: [1, value_lanes].
      scale: factor on the queries, [1, lanes].
      reduction_is_sum: multiply by the number of tokens, the paper's literal form.
    """
    per_key = 1 / jnp.maximum(key_count, 1)
    raw = [x * per_key for x in jnp.split(moments.matrix, degree, axis=1)]
    means = [x * per_key for x in jnp.split(moments.features, degree, axis=1)]
    value_row = moments.values / jnp.maximum(value_count, 1)
    value = column(value_row)
    (mean, *_), (first, *_) = means, raw
    covariance = first - mean * value
    blocks = [scale * covariance]
    if degree >= 2:
        squares, second = means[1], raw[1]
        third = second - 2 * mean * first - (squares - 2 * mean * mean) * value
        blocks.append(scale**2 / 2 * third)
    if degree >= 3:
        cubes, cubed = means[2], raw[2]
        fourth = cubed - 3 * mean * second + 3 * mean**2 * first - mean**3 * value
        fourth = fourth - (cubes - 3 * mean * squares + 2 * mean**3) * value
        fourth = fourth - 3 * (squares - mean**2) * covariance
        blocks.append(scale**3 / 6 * fourth)
    constant = jnp.where(value_count > 0, value_row + value_pivot, 0)
    if reduction_is_sum:
        blocks = [x * key_count for x in blocks]
        constant = constant * value_count
    same_head = layout.same_head()
    blocks = [jnp.where(same_head, x, 0) for x in blocks]
    return ReadOut(jnp.concatenate(blocks, axis=1), constant, None)


def linear_weights(layout: HeadLayout, moments: Moments) -> ReadOut:
    """The moments themselves, and the sums of the features as every value's normalizer."""
    same_head = layout.same_head()
    return ReadOut(
        jnp.where(same_head, moments.matrix, 0),
        None,
        jnp.where(same_head, moments.features, 0),
    )


def column(row: jax.Array) -> jax.Array:
    """A row [1, n] as a column [n, 1], without a transpose."""
    shape = (row.shape[1], row.shape[1])
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(diagonal, row, 0), axis=1, keepdims=True)


def effective_query(
    query: jax.Array, means: list[jax.Array]
) -> tuple[list[jax.Array], jax.Array]:
    """What multiplies mean raw moments to give the expansion at a query; lane by lane.

    As `kernels.effective_features`, for dims that do not mix.

    Args:
      query: [tokens, lanes], scaled.
      means: of the first, second and third powers of the keys about the pivot, as many as the order
        needs; each [tokens, lanes].

    Returns:
      The factors of the same powers, and what the lanes of a head add to the constant 1.
    """
    mean, *higher = means
    along = query * mean
    if not higher:
        return [query], -along
    squares = higher[0]
    pair = query * query / 2
    linear = query - 2 * pair * mean
    constant = along * along - along - pair * squares
    if len(higher) == 1:
        return [linear, pair], constant
    cubes, third = higher[1], query * pair / 3
    linear = linear + 3 * third * (2 * mean * mean - squares)
    constant = constant + third * (6 * mean * squares - 6 * mean * mean * mean - cubes)
    return [linear, pair - 3 * third * mean, third], constant
