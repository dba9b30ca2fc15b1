"""What each kind of attention makes of its moments before the queries read them out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.cumulants import effective_features, read_out_matrix
from cumulant_jax.kernels.features import PolynomialFeatures
from cumulant_jax.kernels.moments import Features


@dataclasses.dataclass(frozen=True)
class CumulantReading:
    """The cumulant expansion: centred moments, no denominator.

    Attributes:
      features: the monomials of the keys.
      reduction_is_sum: times the number of tokens, the paper's literal form.
    """

    features: PolynomialFeatures
    reduction_is_sum: bool = False

    #: Whether keys and values are measured from a pivot.
    pivoted = True
    normalizer_eps = None

    def matrix(
        self, sums: jax.Array, value_pivot: jax.Array, scale: jax.Array, *, dim: int
    ) -> jax.Array:
        """What the features of the queries are multiplied by.

        Args:
          sums: [..., heads, features, value_dim + 1], moments about the pivots.
          value_pivot: [..., heads, value_dim].
          scale: [..., heads], factor on the queries.
          dim: key dimension.

        Returns:
          [..., heads, features, value_dim].
        """
        return read_out_matrix(
            self.features,
            sums,
            value_pivot,
            dim=dim,
            scale=scale[..., None, None].astype(sums.dtype),
            reduction_is_sum=self.reduction_is_sum,
        )

    def effective(
        self, query: jax.Array, feature_sums: jax.Array, scale: jax.Array, *, dim: int
    ) -> jax.Array:
        """The features of queries that read the moments up to each of them.

        Args:
          query: [..., heads, groups, tokens, dim].
          feature_sums: [..., heads, 1, tokens, features], of the keys up to each token.
          scale: [..., heads].
          dim: key dimension.

        Returns:
          [..., heads, groups, tokens, features].
        """
        count = jnp.maximum(feature_sums[..., -1:], 1)
        scale = scale[..., None, None, None].astype(query.dtype)
        out = effective_features(self.features, query, feature_sums / count, dim=dim, scale=scale)
        return out if self.reduction_is_sum else out / count

    def finish(self, out: jax.Array, value_pivot: jax.Array) -> jax.Array:
        """Puts the pivot of the values back.

        The last column of `out` is the sum of the weights: 1, or the count of tokens in sum form,
        or 0 where there is no token yet.

        Args:
          out: [..., tokens, heads, value_dim + 1], read out causally.
          value_pivot: [..., heads, value_dim].

        Returns:
          [..., tokens, heads, value_dim].
        """
        return out[..., :-1] + out[..., -1:] * value_pivot[..., None, :, :]


@dataclasses.dataclass(frozen=True)
class NormalizedReading:
    """Linear attention: raw moments; what belongs to the constant value 1 is the denominator.

    Attributes:
      features: the feature map. The queries come scaled.
      normalizer_eps: added to the denominator.
    """

    features: Features
    normalizer_eps: float

    pivoted = False

    def matrix(
        self, sums: jax.Array, value_pivot: jax.Array, scale: jax.Array, *, dim: int
    ) -> jax.Array:
        """The sums themselves, [..., heads, features, value_dim + 1]."""
        del value_pivot, scale, dim
        return sums

    def effective(
        self, query: jax.Array, feature_sums: jax.Array, scale: jax.Array, *, dim: int
    ) -> jax.Array:
        """The features of the queries, whatever came before."""
        del feature_sums, scale, dim
        return self.features(query)

    def finish(self, out: jax.Array, value_pivot: jax.Array) -> jax.Array:
        """Divides [..., value_dim + 1] by its last column."""
        del value_pivot
        return out[..., :-1] / (out[..., -1:] + self.normalizer_eps)


Reading = CumulantReading | NormalizedReading
