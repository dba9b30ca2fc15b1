"""Bidirectional attention through moments: one operation, whose backward is made of its passes.

  forward    sum the moments of keys and values, turn them into a matrix, read it out with queries
  backward   one pass over queries and output cotangents gives the cotangents of queries and matrix;
             one over keys and values, with the cotangent of the moments, gives theirs

Nothing is kept for the backward pass but the inputs and the moments.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels import passes
from cumulant_jax.kernels.moments import accumulation_dtype
from cumulant_jax.kernels.over_mesh import Axes, run
from cumulant_jax.kernels.pivots import spread_mean
from cumulant_jax.kernels.reading import Reading


def moment_attention(
    reading: Reading,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float | jax.Array,
    operation: str,
    implementation: str | None = None,
) -> jax.Array:
    """Attends in linear time.

    Args:
      reading: the kind of attention: its feature map, and what it makes of the moments.
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      value: [*batch, S, K, Dv].
      mask: None or bool [*batch, S, K or 1].
      scale: factor on the queries, a scalar.
      operation: name of the attention function, for messages.
      implementation: None for the best, or a name.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`.
    """
    facts = passes.Facts.of(reading, query, key, value)
    name = passes.choose(implementation, operation, facts)
    scale = passes.scale_per_head(scale, query, key)
    return _attend(reading, name, query, key, value, mask, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(reading, implementation, query, key, value, mask, scale):
    return _forward(reading, implementation, query, key, value, mask, scale)[0]


def _forward(reading, implementation, query, key, value, mask, scale):
    operation = _Forward(reading, implementation, passes.mask_layout(mask, key))
    inputs = (query, key, value, scale) if mask is None else (query, key, value, scale, mask)
    out, *moments = run(operation, *inputs)
    return out, (inputs, tuple(moments))


def _backward(reading, implementation, residuals, out_bar):
    inputs, moments = residuals
    mask = inputs[4] if len(inputs) == 5 else None
    operation = _Backward(reading, implementation, passes.mask_layout(mask, inputs[1]))
    query, key, value, scale = run(operation, *inputs[:4], *moments, out_bar, *inputs[4:])
    return query, key, value, None, scale


_attend.defvjp(_forward, _backward)


class _Forward(passes.MomentOperation):
    """query, key, value, scale, [mask] -> out, and the moments: sums and the two pivots."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bthv", "bkfc", "bkd", "bkv")

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("bthd", "bskd", "bskv", "bk", *self.mask)

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, *others = arrays
        mask = others[0] if others else None
        reading, core = self.reading, self.passes
        token_axes = axes.get("s", ())
        if core.fused is not None and not token_axes:
            fused = core.fused(reading, query, key, value, mask, scale)
            if fused is not None:
                return fused
        key_pivot, value_pivot = (
            spread_mean(x, mask, token_axes)
            if reading.pivoted
            else jnp.zeros((*x.shape[:-3], *x.shape[-2:]), accumulation_dtype(x))
            for x in (key, value)
        )
        sums = core.sum_moments(
            reading.features, key, value, mask, key_pivot=key_pivot, value_pivot=value_pivot
        )
        if token_axes:
            sums = lax.psum(sums, token_axes)
        matrix = reading.matrix(sums, value_pivot, scale, dim=key.shape[-1])
        eps = reading.normalizer_eps
        out = core.read_out(reading.features, query, matrix, normalizer_eps=eps)
        return out.astype(value.dtype), sums, key_pivot, value_pivot


class _Backward(passes.MomentOperation):
    """The inputs, the moments and the cotangent of out -> those of query, key, value and scale."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bthd", "bskd", "bskv", "bk")

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("bthd", "bskd", "bskv", "bk", "bkfc", "bkd", "bkv", "bthv", *self.mask)

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, sums, key_pivot, value_pivot, out_bar, *others = arrays
        mask = others[0] if others else None
        reading, core = self.reading, self.passes
        make_matrix = functools.partial(reading.matrix, dim=key.shape[-1])
        matrix, pull = jax.vjp(lambda s, c: make_matrix(s, value_pivot, c), sums, scale)
        eps = reading.normalizer_eps
        query_bar, matrix_bar = core.read_out_backward(
            reading.features, query, matrix, out_bar, normalizer_eps=eps
        )
        if matrix_bar.shape != matrix.shape:
            grouped = (*matrix.shape[:-2], -1, *matrix.shape[-2:])
            matrix_bar = jnp.sum(matrix_bar.reshape(grouped), axis=-3)
        if axes.get("t"):
            matrix_bar = lax.psum(matrix_bar, axes["t"])
        sums_bar, scale_bar = pull(matrix_bar)
        key_bar, value_bar = core.sum_moments_backward(
            reading.features,
            key,
            value,
            mask,
            key_pivot=key_pivot,
            value_pivot=value_pivot,
            sums_bar=sums_bar,
        )
        return query_bar, key_bar, value_bar, scale_bar
