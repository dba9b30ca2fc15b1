"""Kernels at shapes worth compiling: what `experiments.inspect_kernels` looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.features import PolynomialFeatures, elu1
from cumulant_jax.kernels.mosaic_gpu.feature_parts import feature_parts
from cumulant_jax.kernels.mosaic_gpu.fused import fused_cumulant, fused_linear
from cumulant_jax.kernels.mosaic_gpu.moments import sum_moments
from cumulant_jax.kernels.mosaic_gpu.moments_backward import sum_moments_backward
from cumulant_jax.kernels.mosaic_gpu.read_out import read_out
from cumulant_jax.kernels.mosaic_gpu.read_out_backward import read_out_backward


class InspectionCase(NamedTuple):
    """One kernel at one shape.

    Attributes:
      name: the operation and the shape.
      function: a function of arrays alone.
      arguments: their shapes and dtypes, or None.
      bytes: what it must read and write once: the floor of its traffic.
      flops: multiplications and additions of its matrix products, without padding.
    """

    name: str
    function: Callable
    arguments: tuple
    bytes: int
    flops: int


class _Shape(NamedTuple):
    """What a case is made of; `order` 0 stands for linear attention with elu + 1."""

    order: int
    batch: int
    tokens: int
    heads: int
    dim: int
    value_dim: int
    masked: bool = False
    dtype: str = "bfloat16"

    @property
    def features(self):
        return PolynomialFeatures(self.order) if self.order else elu1

    @property
    def normalizer_eps(self):
        return None if self.order else 1e-6

    @property
    def columns(self):
        return self.value_dim + (not self.order)

    def label(self, operation):
        kind = f"order {self.order}" if self.order else "elu1"
        sizes = f"{self.batch}x{self.tokens}x{self.heads}x{self.dim}/{self.value_dim}"
        return f"{operation} {kind} {sizes} {self.dtype}{' masked' * self.masked}"


_LONG = (
    _Shape(2, 8, 4096, 12, 64, 64),
    _Shape(3, 8, 4096, 12, 64, 64),
    _Shape(3, 8, 4096, 12, 64, 64, masked=True),
    _Shape(3, 8, 4096, 12, 64, 64, dtype="float16"),
    _Shape(3, 1, 65536, 1, 64, 64),
    _Shape(3, 64, 197, 12, 64, 64),
    _Shape(3, 8, 4096, 16, 48, 24),
    _Shape(3, 8, 4096, 16, 96, 96, masked=True),
    _Shape(3, 8, 4096, 16, 80, 128, masked=True),
    _Shape(3, 8, 4096, 16, 128, 128, masked=True),
    _Shape(3, 8, 1025, 16, 128, 128, masked=True),
    _Shape(4, 8, 4096, 12, 64, 64),
    _Shape(4, 8, 1025, 12, 64, 64, masked=True),
    _Shape(0, 8, 4096, 12, 64, 64, masked=True),
    _Shape(0, 8, 1025, 16, 128, 128),
)
_SHORT = (
    _Shape(2, 256, 197, 12, 64, 64),
    _Shape(3, 256, 197, 12, 64, 64),
    _Shape(3, 256, 197, 12, 64, 64, masked=True),
    _Shape(3, 256, 256, 12, 64, 64),
    _Shape(4, 256, 512, 12, 64, 64, masked=True),
    _Shape(0, 256, 197, 12, 64, 64, masked=True),
)


def inspection_cases() -> list[InspectionCase]:
    """All kernels at shapes that cover their variants.

    >>> inspection_cases()[0].name
    'sum_moments order 2 8x4096x12x64/64 bfloat16'
    """
    long = [case(shape) for shape in _LONG for case in _PASSES]
    return long + [_fused(shape) for shape in _SHORT]


def _array(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _tokens(shape, dim):
    return _array((shape.batch, shape.tokens, shape.heads, dim), shape.dtype)


def _mask(shape):
    return _array((shape.batch, shape.tokens, 1), bool) if shape.masked else None


def _moments_arguments(shape):
    heads = (shape.batch, shape.heads)
    pivots = (_array((*heads, shape.dim)), _array((*heads, shape.value_dim)))
    return (_tokens(shape, shape.dim), _tokens(shape, shape.value_dim), _mask(shape), *pivots)


def _matrix(shape, columns):
    features = feature_parts(shape.features).count(shape.dim)
    return _array((shape.batch, shape.heads, features, columns))


def _case(operation, shape, function, arguments, outputs, products):
    """`outputs` are read or written beside the arguments; `products` counts matrix products."""
    arrays = jax.tree.leaves((arguments, outputs))
    traffic = sum(x.size * jnp.dtype(x.dtype).itemsize for x in arrays)
    per_token = 2 * feature_parts(shape.features).count(shape.dim) * (shape.value_dim + 1)
    tokens = shape.batch * shape.tokens * shape.heads
    flops = products * tokens * per_token
    return InspectionCase(shape.label(operation), function, arguments, traffic, flops)


def _sum_moments(shape):
    function = functools.partial(sum_moments, shape.features)
    outputs = _matrix(shape, shape.value_dim + 1)
    return _case("sum_moments", shape, function, _moments_arguments(shape), outputs, 1)


def _sum_moments_backward(shape):
    function = functools.partial(sum_moments_backward, shape.features)
    inputs = _moments_arguments(shape)
    arguments = (*inputs, _matrix(shape, shape.value_dim + 1))
    return _case("sum_moments_backward", shape, function, arguments, inputs[:2], 2)


def _read_out(shape):
    def function(query, matrix):
        return read_out(shape.features, query, matrix, shape.normalizer_eps)

    arguments = (_tokens(shape, shape.dim), _matrix(shape, shape.columns))
    return _case("read_out", shape, function, arguments, _tokens(shape, shape.value_dim), 1)


def _read_out_backward(shape):
    def function(query, matrix, out_bar):
        return read_out_backward(shape.features, query, matrix, shape.normalizer_eps, out_bar)

    query, matrix = _tokens(shape, shape.dim), _matrix(shape, shape.columns)
    arguments = (query, matrix, _tokens(shape, shape.value_dim))
    return _case("read_out_backward", shape, function, arguments, (query, matrix), 2)


def _fused(shape):
    def function(query, key, value, mask, scale):
        if shape.order:
            return fused_cumulant(
                shape.features, query, key, value, mask, scale, reduction_is_sum=False
            )
        return fused_linear(
            shape.features, query, key, value, mask, normalizer_eps=shape.normalizer_eps
        )

    query, value = _tokens(shape, shape.dim), _tokens(shape, shape.value_dim)
    arguments = (query, query, value, _mask(shape), _array((shape.batch, shape.heads)))
    outputs = (value, _matrix(shape, shape.value_dim + 1))
    return _case("fused", shape, function, arguments, outputs, 2)


_PASSES = (_sum_moments, _sum_moments_backward, _read_out, _read_out_backward)
