"""The passes that every implementation provides, and which implementation serves a call."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cumulant_jax.kernels import causal, moments
from cumulant_jax.kernels.device import Device
from cumulant_jax.kernels.implementation import IMPLEMENTATIONS, choose_implementation
from cumulant_jax.kernels.moments import accumulation_dtype
from cumulant_jax.kernels.reading import Reading


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a kernel's support depends on, besides the device.

    Attributes:
      reading: the kind of attention.
      dtypes: of query, key and value.
      dim: of queries and keys.
      value_dim: of values.
      queries: number of queries.
      keys: number of keys and values.
      heads: of the queries.
      key_heads: of keys and values.
      is_causal: whether each token attends to those up to it.
      is_symbolic: whether a size is not known yet, as in a program for export, or is zero.
    """

    reading: Reading
    dtypes: tuple[jnp.dtype, ...]
    dim: int
    value_dim: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    is_causal: bool
    is_symbolic: bool

    @classmethod
    def of(
        cls,
        reading: Reading,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        is_causal: bool = False,
    ) -> Facts:
        """The facts of a call."""
        arrays = (query, key, value)
        return cls(
            reading=reading,
            dtypes=tuple(x.dtype for x in arrays),
            dim=key.shape[-1],
            value_dim=value.shape[-1],
            queries=query.shape[-3],
            keys=key.shape[-3],
            heads=query.shape[-2],
            key_heads=key.shape[-2],
            is_causal=is_causal,
            is_symbolic=not all(isinstance(n, int) and n for x in arrays for n in x.shape),
        )


@dataclasses.dataclass(frozen=True)
class Passes:
    """One implementation of what attention is made of.

    Attributes:
      sum_moments: as `moments.sum_moments`.
      sum_moments_backward: as `moments.sum_moments_backward`.
      read_out: as `moments.read_out`.
      read_out_backward: as `moments.read_out_backward`.
      causal: as `causal.causal_read_out`, and JAX can differentiate it.
      fits: fits(facts), whether sequences are so short that `fused` serves.
      fused: fused(reading, query, key, value, mask, scale, keep=...) -> out and, where `keep` and
        there is no `fused_backward`, sums, key pivot and value pivot, all in one pass.
      fused_backward: None, or fused_backward(reading, query, key, value, mask, scale, out_bar) ->
        the cotangents of query, key, value and scale.
    """

    sum_moments: Callable
    sum_moments_backward: Callable
    read_out: Callable
    read_out_backward: Callable
    causal: Callable
    fits: Callable[[Facts], bool]
    fused: Callable[..., tuple[jax.Array, ...]] | None = None
    fused_backward: Callable[..., tuple[jax.Array, ...]] | None = None


def _xla() -> Passes:
    return Passes(
        moments.sum_moments,
        moments.sum_moments_backward,
        moments.read_out,
        moments.read_out_backward,
        causal.causal_read_out,
        lambda facts: False,
    )


# Kernels are imported when they are first used: elsewhere they may not even import.
@functools.cache
def passes_of(implementation: str) -> Passes:
    """The passes of an implementation."""
    return _xla() if implementation == "xla" else kernels_of(implementation).passes()


@functools.cache
def kernels_of(implementation: str):
    """The module that wraps the kernels of an implementation."""
    return importlib.import_module(f"cumulant_jax.kernels.{implementation}.passes")


def choose_kernels(
    implementation: str | None, operation: str, unsupported: str, facts: object
) -> str:
    """The implementation that serves a call, see `choose_implementation`.

    Args:
      implementation: None for the best, or a name.
      operation: for messages.
      unsupported: the function (facts, device) -> reason or None of the kernels' modules.
      facts: what support depends on, besides the device.
    """

    def reason(name: str, device: Device) -> str | None:
        return getattr(kernels_of(name), unsupported)(facts, device)

    kernels = {name: functools.partial(reason, name) for name in IMPLEMENTATIONS if name != "xla"}
    return choose_implementation(implementation, operation, kernels)


def choose(implementation: str | None, operation: str, facts: Facts) -> str:
    """The implementation that serves attention through moments."""
    return choose_kernels(implementation, operation, "unsupported", facts)


def zeros_like_head(x: jax.Array) -> jax.Array:
    """Zeros [..., heads, dim] for tokens [..., tokens, heads, dim], in the accumulation dtype.

    Selected by the tokens, which XLA folds away, they have the sharding and the mesh axes of these,
    as what is summed over the tokens does: so one may stand in for the other in a loop or a rule.
    """
    return jnp.sum(jnp.where(x == 0, 0, 0), axis=-3, dtype=accumulation_dtype(x))


def scale_per_head(scale: float | jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """The scale as an array [*batch, key heads], as its cotangent is."""
    scale = jnp.asarray(scale, accumulation_dtype(query))
    return scale + zeros_like_head(key)[..., 0].astype(scale.dtype)


def mask_layout(mask: jax.Array | None, key: jax.Array) -> tuple[str, ...]:
    """The letters of a mask [*batch, tokens, key heads or 1]; none where there is none."""
    if mask is None:
        return ()
    return ("bsk" if mask.shape[-1] == key.shape[-2] else "bsm",)


@dataclasses.dataclass(frozen=True)
class MomentOperation:
    """What the operations made of these passes share, see `over_mesh.Operation`."""

    reading: Reading
    implementation: str
    mask: tuple[str, ...]

    @property
    def passes(self) -> Passes:
        """The passes of the implementation."""
        return passes_of(self.implementation)

    @property
    def needs_one_batch_axis(self) -> bool:
        """Kernels know one batch axis."""
        return self.implementation != "xla"

    def differentiable(self):
        """The same in XLA."""
        return dataclasses.replace(self, implementation="xla")
