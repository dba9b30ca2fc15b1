"""Token statistics: memberships of tokens in heads, and second moments weighted by them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.collectives import (
    Names,
    all_sum,
    gathered_softmax,
    shared,
    sum_before,
)
from cumulant_jax.kernels.over_mesh import (
    Axes,
    Operation,
    is_alone,
    run_differentiable,
    run_directly,
)
from cumulant_jax.kernels.passes import choose_kernels, kernels_of

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


@dataclasses.dataclass(frozen=True)
class StatisticsFacts:
    """What a kernel's support depends on, besides the device.

    Attributes:
      dtype: of the tokens.
      heads: number of heads.
      dim: of a head.
      is_causal: whether each token attends to those up to it.
      bias_per_row: whether the denominator's bias differs between examples.
      is_symbolic: whether a size is not known yet, or is zero.
    """

    dtype: jnp.dtype
    heads: int
    dim: int
    is_causal: bool
    bias_per_row: bool
    is_symbolic: bool


def token_statistics(
    w: jax.Array, temperature: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Memberships and second moments over all tokens.

    Args:
      w: [..., tokens, heads, dim].
      temperature: [heads].
      mask: None or bool [..., tokens].

    Returns:
      Π [..., tokens, heads] and m [..., heads, dim], in float32 or float64.
    """
    return _statistics(_prepare(w, mask), temperature, mask, (), ())


def attend(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    *,
    implementation: str | None,
) -> jax.Array:
    """Attention from the statistics of all tokens.

    Args:
      w: [*batch, T, H, D].
      temperature: [H].
      mask: None or bool [*batch, T].
      implementation: None for the best, or a name.

    Returns:
      [*batch, T, H, D] in the dtype of w.
    """
    name = _choose(implementation, w)
    temperature = _like_tokens(name, temperature, w)
    operation = _Attend(name, mask is not None)
    (out,) = _run(operation, w, temperature, *(() if mask is None else (mask,)))
    return out


def causal_attend(
    w: jax.Array,
    temperature: jax.Array,
    mask: jax.Array | None,
    bias: jax.Array | None,
    state: TokenStatisticsState,
    *,
    implementation: str | None,
) -> tuple[jax.Array, TokenStatisticsState]:
    """The attention of each token to those up to it.

    Args:
      w: [*batch, T, H, D].
      temperature: [H].
      mask: None or bool [*batch, T].
      bias: None or [H, T] or [*batch, H, T], added to the shares.
      state: what the tokens so far amount to.
      implementation: None for the best, or a name.

    Returns:
      [*batch, T, H, D] in the dtype of w, and the state after the last token.
    """
    per_row = bias is not None and bias.ndim > 2
    name = _choose(implementation, w, is_causal=True, bias_per_row=per_row)
    arrays = [w, _like_tokens(name, temperature, w), *state]
    layout = ""
    if bias is not None:
        layout = "bks" if per_row else "ks"
        arrays.append(_like_tokens(name, bias, w, layout))
    operation = _CausalAttend(name, mask is not None, layout)
    out, *after = _run(operation, *arrays, *(() if mask is None else (mask,)))
    return out, TokenStatisticsState(*after)


def empty_statistics(w: jax.Array) -> TokenStatisticsState:
    """The state before the first token of w [..., tokens, heads, dim]."""
    # Selected by the tokens, they have the sharding of these.
    zeros = jnp.sum(jnp.where(w == 0, 0, 0), axis=-3, dtype=_dtype(w))
    return TokenStatisticsState(zeros, zeros, zeros[..., 0])


def _choose(implementation, w, *, is_causal=False, bias_per_row=False) -> str:
    is_symbolic = not all(isinstance(n, int) and n for n in w.shape)
    facts = StatisticsFacts(
        dtype=w.dtype,
        heads=w.shape[-2],
        dim=w.shape[-1],
        is_causal=is_causal,
        bias_per_row=bias_per_row,
        is_symbolic=is_symbolic,
    )
    operation = f"{'causal ' * is_causal}token_statistics_attention"
    return choose_kernels(implementation, operation, "unsupported_statistics", facts)


def _run(operation: Operation, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    # On one device JAX differentiates the operation as it is, and need not run it again for that.
    return (run_directly if is_alone() else run_differentiable)(operation, *arrays)


def _dtype(w: jax.Array):
    return jnp.result_type(jnp.float32, w.dtype)


def _like_tokens(name: str, x: jax.Array, w: jax.Array, layout: str = "k") -> jax.Array:
    """A parameter in the dtype of the computation, with the sharding that its cotangent will have.

    A custom derivative wants the two alike. Zeros that are selected by the tokens, which XLA folds
    away, bring their sharding along; where JAX differentiates by itself there is no need.
    """
    x = x.astype(_dtype(w))
    if name == "xla" and is_alone():
        return x
    zeros = jnp.sum(jnp.where(w == 0, 0, 0), axis=-1, dtype=x.dtype)  # [*batch, tokens, heads]
    zeros = jnp.swapaxes(zeros, -1, -2)
    if "s" not in layout:
        zeros = jnp.sum(zeros, axis=-1)
    if "b" not in layout:
        zeros = jnp.sum(zeros, axis=tuple(range(zeros.ndim - len(layout))))
    return x + zeros


def _prepare(w: jax.Array, mask: jax.Array | None) -> jax.Array:
    """W in float32 at least, zero where masked."""
    w = w.astype(_dtype(w))
    return w if mask is None else jnp.where(mask[..., None, None], w, 0)


def _statistics(w, temperature, mask, tokens: Names, heads: Names):
    """Memberships and second moments, where tokens and heads are split over mesh axes."""

    def total(x, axis):
        return shared(all_sum(jnp.sum(x, axis=axis), tokens), tokens)

    squares = w * w
    energy = jnp.expand_dims(total(squares, -3), -3)
    # Dividing w by the norm, not w² by the energy, keeps the gradient finite in float32 where the
    # energy is at its floor: its square would underflow.
    present = energy > _ENERGY_FLOOR
    norm = jnp.where(present, jnp.sqrt(jnp.where(present, energy, 1)), _ENERGY_FLOOR**0.5)
    shares = jnp.sum((w / norm) ** 2, axis=-1)
    temperature = temperature.astype(w.dtype).reshape(*(1,) * (w.ndim - 2), -1)
    membership = gathered_softmax(temperature * shares, heads)
    if mask is not None:
        membership = jnp.where(mask[..., None], membership, 0)
    weighted = total(membership[..., None] * squares, -3)
    return membership, weighted / (total(membership, -2)[..., None] + _MEMBERSHIP_EPS)


@dataclasses.dataclass(frozen=True)
class _Operation:
    implementation: str
    has_mask: bool

    @property
    def needs_one_batch_axis(self) -> bool:
        return self.implementation != "xla"

    def differentiable(self):
        return dataclasses.replace(self, implementation="xla")

    def kernel(self, axes: Axes, name: str):
        """The kernel of that name; None where there is none for tokens or heads that are split."""
        if self.implementation == "xla" or axes.get("s") or axes.get("k"):
            return None
        return getattr(kernels_of(self.implementation), name)


class _Attend(_Operation):
    """w, temperature, [mask] -> out."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("bskd", "k", *("bs",) * self.has_mask)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bskd",)

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        w, temperature, *others = arrays
        mask = others[0] if self.has_mask else None
        tokens, heads = axes.get("s", ()), axes.get("k", ())
        temperature = shared(temperature, axes.get("b", ()) + tokens)
        kernel = self.kernel(axes, "token_statistics")
        if kernel is not None:
            return (kernel(w, temperature, mask),)
        wide = _prepare(w, mask)
        membership, second_moment = _statistics(wide, temperature, mask, tokens, heads)
        out = -wide * membership[..., None] / (1 + second_moment[..., None, :, :])
        return (out.astype(w.dtype),)


@dataclasses.dataclass(frozen=True)
class _CausalAttend(_Operation):
    """w, temperature, state, [bias], [mask] -> out and the state after the last token."""

    bias: str

    @property
    def inputs(self) -> tuple[str, ...]:
        bias = (self.bias,) if self.bias else ()
        return ("bskd", "k", "bkd", "bkd", "bk", *bias, *("bs",) * self.has_mask)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("bskd", "bkd", "bkd", "bk")

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        tokens, heads, batch = axes.get("s", ()), axes.get("k", ()), axes.get("b", ())
        w, temperature, *state = arrays[:5]
        others = list(arrays[5:])
        temperature = shared(temperature, batch + tokens)
        bias = others.pop(0) if self.bias else None
        if self.bias == "ks":
            bias = shared(bias, batch)
        mask = others.pop(0) if self.has_mask else None
        kernel = self.kernel(axes, "causal_token_statistics")
        if kernel is not None:
            return kernel(w, temperature, mask, bias, tuple(state))
        wide = _prepare(w, mask)
        squares = wide * wide

        def running(x, start, axis):
            """The sum up to each token, and the one after the last token of all shards."""
            total = jnp.sum(x, axis=axis)
            before = shared(start, tokens) + sum_before(total, tokens)
            before = jnp.expand_dims(before, axis)
            return before + jnp.cumsum(x, axis=axis), start + all_sum(total, tokens)

        energy, last_energy = running(squares, state[0], -3)
        shares = jnp.sum(squares / jnp.maximum(energy, _RUNNING_ENERGY_FLOOR), axis=-1)
        if bias is not None:
            shares = shares + w.shape[-1] * jnp.swapaxes(bias, -1, -2)
        membership = gathered_softmax(temperature.astype(shares.dtype) * shares, heads)
        if mask is not None:
            membership = jnp.where(mask[..., None], membership, 0)
        weighted, last_weighted = running(membership[..., None] * squares, state[1], -3)
        total, last_membership = running(membership, state[2], -2)
        second_moment = weighted / (total[..., None] + _MEMBERSHIP_EPS)
        out = -wide * membership[..., None] / (1 + second_moment)
        return out.astype(w.dtype), last_energy, last_weighted, last_membership
