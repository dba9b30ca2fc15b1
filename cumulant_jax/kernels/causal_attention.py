"""Causal attention through moments: one operation, with the state that it carries.

On a mesh that splits the tokens every shard starts from the moments of the shards before it. They
come from one all-gather of moment matrices, whatever the number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels import passes
from cumulant_jax.kernels.causal import MomentState
from cumulant_jax.kernels.over_mesh import Axes, is_alone, run, run_directly
from cumulant_jax.kernels.pivots import first_mean
from cumulant_jax.kernels.reading import Reading


def causal_attention(
    reading: Reading,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    state: MomentState | None,
    *,
    scale: float | jax.Array,
    operation: str,
    implementation: str | None = None,
) -> tuple[jax.Array, MomentState]:
    """Attends to the tokens up to each one, in linear time.

    Args:
      reading: the kind of attention: its feature map, and what it makes of the moments.
      query: [*batch, T, H, D].
      key: [*batch, T, K, D]; H is a multiple of K.
      value: [*batch, T, K, Dv].
      mask: None or bool [*batch, T, K or 1].
      state: what the tokens so far amount to; None before the first.
      scale: factor on the queries, a scalar.
      operation: name of the attention function, for messages.
      implementation: None for the best, or a name.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`, and the state after the last token.
    """
    facts = passes.Facts.of(reading, query, key, value, is_causal=True)
    name = passes.choose(implementation, f"causal {operation}", facts)
    inputs = (query, key, value, passes.scale_per_head(scale, query, key))
    inputs += (() if state is None else tuple(state)) + (() if mask is None else (mask,))
    forward = _Forward(reading, name, passes.mask_layout(mask, key), state is not None)
    # Differentiated as it is, an operation keeps the states between chunks; on a mesh it makes them
    # anew in its backward pass.
    out, *after = (run_directly if is_alone() else _attend)(forward, *inputs)
    return out, MomentState(*after)


def state_shapes(reading: Reading, key: jax.Array, value: jax.Array) -> MomentState:
    """The shapes and dtype of the state, as `jax.ShapeDtypeStruct`."""
    dtype = passes.accumulation_dtype(key, value)
    shape: Any = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    heads = (*key.shape[:-3], key.shape[-2])
    features = jax.eval_shape(reading.features, shape(key.shape)).shape[-1]
    return MomentState(
        shape((*heads, features, value.shape[-1] + 1)),
        shape((*heads, key.shape[-1])),
        shape((*heads, value.shape[-1])),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(forward: _Forward, *inputs):
    return run(forward, *inputs)


def _attend_forward(forward, *inputs):
    results = run(forward, *inputs)
    return results, (inputs, results[1:])


def _attend_backward(forward, residuals, cotangents):
    inputs, (sums, *pivots) = residuals
    out_bar, sums_bar, *_ = cotangents
    *_, start, mask = forward.split(inputs)
    start = jnp.zeros_like(sums) if start is None else start[0]
    backward = _Backward(forward.reading, forward.implementation, forward.mask, True)
    masks = () if mask is None else (mask,)
    *bars, start_bar = run(backward, *inputs[:4], start, *pivots, *masks, out_bar, sums_bar)
    state_bars = (start_bar, *map(jnp.zeros_like, pivots)) if forward.has_state else ()
    return (*bars, *state_bars, *(None,) * len(masks))


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True)
class _Operation(passes.MomentOperation):
    """query, key, value, scale, [sums, key_pivot, value_pivot], [mask], ... with one letter s for
    the tokens of all: no array has the tokens of queries and keys on different mesh axes.
    """

    has_state: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        state = ("bkfc", "bkd", "bkv") if self.has_state else ()
        return ("bshd", "bskd", "bskv", "bk", *state, *self.mask)

    def split(self, arrays):
        """query, key, value, scale, state or None, mask or None, and the rest in a tuple."""
        query, key, value, scale, *others = arrays
        state = MomentState(*others[:3]) if self.has_state else None
        others = others[3 * self.has_state :]
        mask = others[0] if self.mask else None
        return query, key, value, scale, state, mask


class _Forward(_Operation):
    """... -> out and the state after the last token."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bshv", "bkfc", "bkd", "bkv")

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, state, mask = self.split(arrays)
        reading, core, token_axes = self.reading, self.passes, axes.get("s", ())
        if state is None:
            state = _empty_state(reading, key, value, mask, token_axes)
        start, pivots = state.sums, state[1:]
        if token_axes:
            before, total = _other_shards(core, reading, key, value, mask, pivots, token_axes)
            out, _ = core.causal(reading, query, key, value, mask, scale, start + before, *pivots)
            return out, start + total, *pivots
        out, sums = core.causal(reading, query, key, value, mask, scale, *state)
        return out, sums, *pivots


class _Backward(_Operation):
    """..., cotangents of out and sums -> those of query, key, value, scale and the first sums."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, "bshv", "bkfc")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bshd", "bskd", "bskv", "bk", "bkfc")

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, key, value, scale, state, mask = self.split(arrays[:-2])
        assert state is not None
        out_bar, sums_bar = arrays[-2:]
        core, token_axes, pivots = self.passes, axes.get("s", ()), state[1:]
        start = state.sums
        if token_axes:
            before, _ = _other_shards(core, self.reading, key, value, mask, pivots, token_axes)
            start = start + before

        def forward(query, key, value, scale, sums):
            return core.causal(self.reading, query, key, value, mask, scale, sums, *pivots)

        _, pull = jax.vjp(forward, query, key, value, scale, start)
        if not token_axes:
            return pull((out_bar, sums_bar))
        *bars, start_bar = pull((out_bar, jnp.zeros_like(sums_bar)))
        query_bar, key_bar, value_bar, scale_bar = bars
        # What this shard adds to the moments reaches the shards after it and the last state.
        start_bars, index = _gather(start_bar, token_axes)
        later = jnp.arange(start_bars.shape[0]) > index
        after = jnp.tensordot(later.astype(start_bars.dtype), start_bars, axes=1)
        more = core.sum_moments_backward(
            self.reading.features,
            key,
            value,
            mask,
            key_pivot=pivots[0],
            value_pivot=pivots[1],
            sums_bar=sums_bar + after,
        )
        key_bar, value_bar = key_bar + more[0], value_bar + more[1]
        scale_bar = lax.psum(scale_bar, token_axes)
        return query_bar, key_bar, value_bar, scale_bar, sums_bar + jnp.sum(start_bars, axis=0)


def _empty_state(reading, key, value, mask, token_axes) -> MomentState:
    """The state before the first token."""
    zeros = [passes.zeros_like_head(x) for x in (key, value)]
    pivots = zeros
    if reading.pivoted:
        pivots = [first_mean(x, mask, token_axes).astype(zeros[0].dtype) for x in (key, value)]
    zero = (zeros[0][..., 0] + zeros[1][..., 0])[..., None, None]
    sums = jnp.broadcast_to(zero, state_shapes(reading, key, value).sums.shape)
    return MomentState(sums, *pivots)


def _other_shards(core, reading, key, value, mask, pivots, token_axes):
    """The moments of the tokens on the shards before this one, and of those on all."""
    key_pivot, value_pivot = pivots
    sums = core.sum_moments(
        reading.features, key, value, mask, key_pivot=key_pivot, value_pivot=value_pivot
    )
    gathered, index = _gather(sums, token_axes)
    earlier = (jnp.arange(gathered.shape[0]) < index).astype(sums.dtype)
    return jnp.tensordot(earlier, gathered, axes=1), jnp.sum(gathered, axis=0)


def _gather(x: jax.Array, token_axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """The arrays of all shards along the tokens, stacked, and the index of this one."""
    return lax.all_gather(x, token_axes), lax.axis_index(token_axes)
