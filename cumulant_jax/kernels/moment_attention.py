"""Bidirectional attention through moments: one operation, whose backward is made of its passes.

  forward    sum the moments of keys and values, turn them into a matrix, read it out with queries
  backward   one pass over queries and output cotangents gives the cotangents of queries and matrix;
             one over keys and values, with the cotangent of the moments, gives theirs

Nothing is kept for the backward pass but the inputs and the moments.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels import passes
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
    fused = passes.passes_of(name).fits(facts)
    forward = _Forward(reading, name, passes.mask_layout(mask, key), fused)
    return _attend(forward, query, key, value, scale, *(() if mask is None else (mask,)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(forward: _Forward, *inputs):
    return run(dataclasses.replace(forward, keep=False), *inputs)[0]


def _attend_forward(forward, *inputs):
    out, *moments = run(forward, *inputs)
    return out, (inputs, tuple(moments))


def _attend_backward(forward, residuals, out_bar):
    inputs, moments = residuals
    backward = _Backward(forward.reading, forward.implementation, forward.mask, forward.fused)
    bars = run(backward, *inputs, *moments, out_bar)
    return (*bars, *(None,) * len(forward.mask))


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True)
class _Operation(passes.MomentOperation):
    """query, key, value, scale, [mask], ...

    Attributes:
      fused: whether one pass does all of it, unless a mesh splits the tokens.
      keep: whether the forward pass returns the moments that the backward pass uses.
    """

    fused: bool
    keep: bool = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("bthd", "bskd", "bskv", "bk", *self.mask)

    @property
    def moments(self) -> tuple[str, ...]:
        """Sums, key pivot and value pivot, where these are kept: one pass makes them anew."""
        fused_backward = self.fused and self.passes.fused_backward is not None
        return () if fused_backward or not self.keep else ("bkfc", "bkd", "bkv")

    def sum_moments(self, token_axes, key, value, mask):
        """The sums, key pivot and value pivot over the tokens of all shards."""
        reading = self.reading
        pivots = [
            spread_mean(x, mask, token_axes) if reading.pivoted else passes.zeros_like_head(x)
            for x in (key, value)
        ]
        sums = self.passes.sum_moments(
            reading.features, key, value, mask, key_pivot=pivots[0], value_pivot=pivots[1]
        )
        return lax.psum(sums, token_axes) if token_axes else sums, *pivots


class _Forward(_Operation):
    """... -> out, and the moments where they are kept."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bthv", *self.moments)

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, *others = arrays
        mask = others[0] if self.mask else None
        reading, core, token_axes = self.reading, self.passes, axes.get("s", ())
        if self.fused and core.fused is not None and not token_axes:
            fused = core.fused(reading, query, key, value, mask, scale, keep=self.keep)
            return fused[: len(self.outputs)]
        moments = self.sum_moments(token_axes, key, value, mask)
        matrix = reading.matrix(moments[0], moments[2], scale, dim=key.shape[-1])
        eps = reading.normalizer_eps
        out = core.read_out(reading.features, query, matrix, normalizer_eps=eps)
        return (out.astype(value.dtype), *moments)[: len(self.outputs)]


class _Backward(_Operation):
    """..., [moments], cotangent of out -> those of query, key, value and scale."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, *self.moments, "bthv")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bthd", "bskd", "bskv", "bk")

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, *others, out_bar = arrays
        mask = others.pop(0) if self.mask else None
        reading, core = self.reading, self.passes
        query_axes, key_axes = axes.get("t", ()), axes.get("s", ())
        if self.fused and core.fused_backward is not None and not (query_axes or key_axes):
            return core.fused_backward(reading, query, key, value, mask, scale, out_bar)
        moments = others or self.sum_moments(key_axes, key, value, mask)
        sums, key_pivot, value_pivot = moments
        make_matrix = functools.partial(reading.matrix, dim=key.shape[-1])
        matrix, pull = jax.vjp(lambda s, c: make_matrix(s, value_pivot, c), sums, scale)
        query_bar, matrix_bar = core.read_out_backward(
            reading.features,
            query,
            matrix,
            normalizer_eps=reading.normalizer_eps,
            out_bar=out_bar,
        )
        if matrix_bar.shape != matrix.shape:
            grouped = (*matrix.shape[:-2], -1, *matrix.shape[-2:])
            matrix_bar = jnp.sum(matrix_bar.reshape(grouped), axis=-3)
        if query_axes:
            matrix_bar = lax.psum(matrix_bar, query_axes)
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
