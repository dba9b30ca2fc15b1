"""Token statistics: memberships of tokens in heads, and second moments weighted by them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.collectives import all_sum, gathered_softmax, shared, sum_before
from cumulant_jax.kernels.over_mesh import Axes, is_alone, run_differentiable

# The published code floors the norm over all tokens at 1e-12, but the running energy at 1e-12.
_ENERGY_FLOOR = 1e-24
_RUNNING_ENERGY_FLOOR = 1e-12
_MEMBERSHIP_EPS = 1e-8


class TokenStatisticsState(NamedTuple):
    """What causal token statistics carry: 2·dim + 1 numbers per head.

    Attributes:
      energy: [*batch, H, D], Σ w².
      weighted: [*batch, H, D], Σ Π w².
      membership: [*batch, H], Σ Π.
    """

    energy: jax.Array
    weighted: jax.Array
    membership: jax.Array


def token_statistics(
    w: jax.Array, temperature: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Memberships and second moments over all tokens.

    Args:
      w: [..., tokens, heads, dim], float32 or float64, zero where masked.
      temperature: [heads].
      mask: None or bool [..., tokens].

    Returns:
      Π [..., tokens, heads] and m [..., heads, dim].
    """
    squares = w * w
    energy = jnp.sum(squares, axis=-3, keepdims=True)
    # Dividing w by the norm, not w² by the energy, keeps the gradient finite in float32 where the
    # energy is at its floor: its square would underflow.
    present = energy > _ENERGY_FLOOR
    norm = jnp.where(present, jnp.sqrt(jnp.where(present, energy, 1)), _ENERGY_FLOOR**0.5)
    shares = jnp.sum((w / norm) ** 2, axis=-1)
    temperature = temperature.astype(w.dtype).reshape(*(1,) * (w.ndim - 2), -1)
    membership = jax.nn.softmax(temperature * shares, axis=-1)
    if mask is not None:
        membership = jnp.where(mask[..., None], membership, 0)
    weighted = jnp.sum(membership[..., None] * squares, axis=-3)
    total = jnp.sum(membership, axis=-2)[..., None] + _MEMBERSHIP_EPS
    return membership, weighted / total


def empty_statistics(w: jax.Array) -> TokenStatisticsState:
    """The state before the first token of w [..., tokens, heads, dim]."""
    # Selected by the tokens, zeros have the sharding of these.
    zeros = jnp.sum(jnp.where(w == 0, 0, 0), axis=-3, dtype=w.dtype)
    return TokenStatisticsState(zeros, zeros, zeros[..., 0])


def causal_token_statistics(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    state: TokenStatisticsState,
) -> tuple[jax.Array, TokenStatisticsState]:
    """The attention of each token to those up to it.

    Args:
      w: [*batch, T, H, D], float32 or float64, zero where masked.
      temperature: [H].
      mask: None or bool [*batch, T].
      bias: None or [H, T] or [*batch, H, T], added to the shares.
      state: what the tokens so far amount to.

    Returns:
      [*batch, T, H, D] and the state after the last token.
    """
    # Temperature and bias per example, as their cotangents are. What they are added to, which XLA
    # folds away, gives them the sharding of the tokens.
    zeros = jnp.where(w == 0, 0, 0).astype(w.dtype)
    arrays = [w, temperature.astype(w.dtype) + jnp.sum(zeros, axis=(-3, -1)), *state]
    if bias is not None:
        arrays.append(bias.astype(w.dtype) + jnp.swapaxes(jnp.sum(zeros, axis=-1), -1, -2))
    if mask is not None:
        arrays.append(mask)
    operation = _Causal(bias is not None, mask is not None)
    run = operation if is_alone() else lambda _, *x: run_differentiable(operation, *x)
    out, *after = run({}, *arrays)
    return out, TokenStatisticsState(*after)


@dataclasses.dataclass(frozen=True)
class _Causal:
    """w, temperature, state, [bias], [mask] -> out and the state after the last token."""

    has_bias: bool
    has_mask: bool

    needs_one_batch_axis = False

    @property
    def inputs(self) -> tuple[str, ...]:
        bias, mask = ("bks",) * self.has_bias, ("bs",) * self.has_mask
        return ("bskd", "bk", "bkd", "bkd", "bk", *bias, *mask)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bskd", "bkd", "bkd", "bk")

    def differentiable(self) -> _Causal:
        return self

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        tokens, heads = axes.get("s", ()), axes.get("k", ())
        w, temperature, *state = arrays[:5]
        temperature = shared(temperature, tokens)
        others = list(arrays[5:])
        squares = w * w

        def running(x, start, axis):
            """The sum up to each token, and the one after the last token of all shards."""
            total = jnp.sum(x, axis=axis)
            before = shared(start, tokens) + sum_before(total, tokens)
            before = jnp.expand_dims(before, axis)
            return before + jnp.cumsum(x, axis=axis), start + all_sum(total, tokens)

        energy, last_energy = running(squares, state[0], -3)
        shares = jnp.sum(squares / jnp.maximum(energy, _RUNNING_ENERGY_FLOOR), axis=-1)
        if self.has_bias:
            shares = shares + w.shape[-1] * jnp.swapaxes(others.pop(0), -1, -2)
        membership = gathered_softmax(temperature[..., None, :] * shares, heads)
        if self.has_mask:
            membership = jnp.where(others.pop(0)[..., None], membership, 0)
        weighted, last_weighted = running(membership[..., None] * squares, state[1], -3)
        total, last_membership = running(membership, state[2], -2)
        second_moment = weighted / (total[..., None] + _MEMBERSHIP_EPS)
        out = -w * membership[..., None] / (1 + second_moment)
        return out, last_energy, last_weighted, last_membership
