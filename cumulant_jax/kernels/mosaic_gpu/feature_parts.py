"""Feature maps as the kernels see them: a few functions of one coordinate each.

Every feature map that a kernel supports acts on each coordinate alone, so F features of a
D-dimensional vector are `len(values)` blocks of D, and a block is one operand of the tensor core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.features import PolynomialFeatures, elu1
from cumulant_jax.kernels.moments import Features

Elementwise = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class FeatureParts:
    """A feature map, block by block.

    Attributes:
      values: for each block the function of the coordinate.
      derivatives: their derivatives.
      constant: whether a constant 1 follows the blocks.
      keep_zero: whether every function maps 0 to 0, so that a zero row needs no second mask.
    """

    values: tuple[Elementwise, ...]
    derivatives: tuple[Elementwise, ...]
    constant: bool
    keep_zero: bool

    @property
    def first_is_identity(self) -> bool:
        """Whether the first block is the vector itself, which needs no computing."""
        return self.values[0] is _identity

    def count(self, dim: int) -> int:
        """The number of features of a `dim`-dimensional vector."""
        return len(self.values) * dim + self.constant


def feature_parts(features: Features) -> FeatureParts:
    """The blocks of a feature map.

    Raises:
      NotImplementedError: no kernel supports it.
    """
    parts = find_parts(features)
    if parts is None:
        raise NotImplementedError(
            "features of the mosaic_gpu kernels are monomials of order 2 to 4 without pairs, elu1, "
            f"relu or exp, not {features}; use implementation='xla'."
        )
    return parts


def find_parts(features: Features) -> FeatureParts | None:
    """The blocks of a feature map, or None where no kernel supports it."""
    if isinstance(features, PolynomialFeatures):
        if features.all_pairs or features.order < 2:
            return None
        powers = features.order - 1
        return FeatureParts(_POWERS[:powers], _POWER_DERIVATIVES[:powers], True, True)
    return _ELEMENTWISE.get(features)


def _identity(x):
    return x


def _elu1(x):
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _elu1_derivative(x):
    return jnp.where(x > 0, 1.0, jnp.exp(jnp.minimum(x, 0)))


_POWERS = (_identity, lambda x: x * x, lambda x: x * x * x)
_POWER_DERIVATIVES = (jnp.ones_like, lambda x: 2 * x, lambda x: 3 * (x * x))
_ELEMENTWISE = {
    elu1: FeatureParts((_elu1,), (_elu1_derivative,), constant=False, keep_zero=False),
    jax.nn.relu: FeatureParts(
        (lambda x: jnp.maximum(x, 0),),
        (lambda x: jnp.where(x > 0, 1.0, 0.0),),
        constant=False,
        keep_zero=True,
    ),
    jnp.exp: FeatureParts((jnp.exp,), (jnp.exp,), constant=False, keep_zero=False),
}
