"""What the kernels compute on blocks in VMEM: plain functions of arrays, shared by all of them.

A backward kernel is `jax.vjp` of the same function, traced inside the kernel. Everything is float32
here; `dot` rounds its operands to the dtype of the inputs on the way into the matrix unit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.features import PolynomialFeatures, elu1
from cumulant_jax.kernels.mosaic_tpu.layout import keep


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype) -> jax.Array:
    """Contracts axis contract[0] of `a` with contract[1] of `b`; float32, free axes in order.

    bfloat16 products are exact and their sums are float32. float32 operands go through the matrix
    unit at `lax.Precision.HIGHEST` (six bfloat16 products, as near to float32 as XLA comes).
    """
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _dot_forward(a, b, contract, dtype):
    return dot(a, b, contract, dtype), (a, b)


def _dot_backward(contract, dtype, residuals, g):
    a, b = residuals
    on_a, on_b = contract
    if on_a == 1:
        a_bar = dot(g, b, (1, 1 - on_b), dtype)
    else:
        a_bar = dot(b, g, (1 - on_b, 1), dtype)
    if on_b == 0:
        b_bar = dot(a, g, (1 - on_a, 0), dtype)
    else:
        b_bar = dot(g, a, (0, 1 - on_a), dtype)
    return a_bar, b_bar


dot.defvjp(_dot_forward, _dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(x: jax.Array, dtype) -> jax.Array:
    """`x` as `dtype` sees it, still float32. Its derivative is taken to be 1."""
    return x.astype(dtype).astype(x.dtype)


rounded.defvjp(lambda x, dtype: (rounded(x, dtype), None), lambda dtype, _, g: (g,))


@jax.custom_vjp
def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x, divided once for the derivative too."""
    return 1 / x


def _reciprocal_forward(x):
    inverse = reciprocal(x)
    return inverse, inverse


reciprocal.defvjp(_reciprocal_forward, lambda inverse, g: (-g * inverse * inverse,))


@dataclasses.dataclass(frozen=True)
class LaneFeatures:
    """A feature map that acts on each lane by itself.

    Attributes:
      parts: turns [tokens, lanes] into a tuple of such arrays, the features without the constant.
      degree: how many.
      constant: whether the constant 1 belongs to the features, as the last one.
      zero_at_zero: whether the parts of 0 are 0.
    """

    parts: Callable[[jax.Array], tuple[jax.Array, ...]]
    degree: int
    constant: bool
    zero_at_zero: bool

    def __call__(self, x: jax.Array, dtype, valid: jax.Array | None = None) -> jax.Array:
        """[tokens, lanes] to [tokens, degree · lanes], rounded; 0 where `x`, being invalid, is."""
        parts = self.parts(x)
        if not self.zero_at_zero:
            parts = tuple(keep(part, valid) for part in parts)
        return rounded(jnp.concatenate(parts, axis=1), dtype)


def _elu1(x: jax.Array) -> jax.Array:
    """As `elu1`, by way of exp: there is no expm1 in the vector unit."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0.0, x)))


_ELEMENTWISE: dict[Any, LaneFeatures] = {
    elu1: LaneFeatures(lambda x: (_elu1(x),), 1, False, False),
    jax.nn.relu: LaneFeatures(lambda x: (jnp.where(x > 0, x, 0.0),), 1, False, True),
    jnp.exp: LaneFeatures(lambda x: (jnp.exp(x),), 1, False, False),
}


def lane_features(features: Callable[[jax.Array], jax.Array]) -> LaneFeatures | None:
    """The form that kernels use of a feature map, None for one they do not know."""
    if isinstance(features, PolynomialFeatures):
        if features.all_pairs or features.order < 2:
            return None
        degree = features.order - 1
        return LaneFeatures(lambda x: (x, x * x, x * x * x)[:degree], degree, True, True)
    return _ELEMENTWISE.get(features)


def known_features(features: Callable[[jax.Array], jax.Array]) -> LaneFeatures:
    """As `lane_features`; raises where there is no such form."""
    found = lane_features(features)
    if found is None:
        raise NotImplementedError(f"The TPU kernels do not know the feature map {features!r}.")
    return found


class Moments(NamedTuple):
    """Sums over tokens for one group of heads.

    Attributes:
      matrix: [value_lanes, degree · lanes], Σ value ⊗ features.
      features: [1, degree · lanes], Σ features.
      values: [1, value_lanes], Σ value.
    """

    matrix: jax.Array
    features: jax.Array
    values: jax.Array


def sum_moments(
    features: LaneFeatures, dtype, key: jax.Array, value: jax.Array, valid: jax.Array | None
) -> Moments:
    """Moments of keys and values about their pivots, 0 where they are not valid."""
    phi = features(key, dtype, valid)
    value = rounded(value, dtype)
    return Moments(
        dot(value, phi, (0, 0), dtype),
        jnp.sum(phi, axis=0, keepdims=True),
        jnp.sum(value, axis=0, keepdims=True),
    )


class ReadOut(NamedTuple):
    """What the query features are multiplied by, for one group of heads.

    Attributes:
      matrix: [value_lanes, degree · lanes].
      constant: [1, value_lanes], the row that belongs to the constant, if there is one.
      normalizer: like `matrix`, a head's normalizer in each of its value lanes, if there is one.
    """

    matrix: jax.Array
    constant: jax.Array | None
    normalizer: jax.Array | None


def read_out(
    features: LaneFeatures, dtype, eps: float | None, query: jax.Array, weights: ReadOut
) -> jax.Array:
    """[tokens, lanes] to [tokens, value_lanes]."""
    phi = features(query, dtype)
    out = dot(phi, weights.matrix, (1, 1), dtype)
    if weights.constant is not None:
        out = out + weights.constant
    if weights.normalizer is not None:
        out = out * reciprocal(dot(phi, weights.normalizer, (1, 1), dtype) + eps)
    return out
