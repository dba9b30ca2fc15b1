"""What each kind of attention makes of its moments before the queries read them out."""

from __future__ import annotations

import dataclasses

import jax

from cumulant_jax.kernels.cumulants import read_out_matrix
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


Reading = CumulantReading | NormalizedReading
