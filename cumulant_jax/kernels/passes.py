"""The passes that every implementation provides, and which implementation serves a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cumulant_jax.kernels import causal, moments
from cumulant_jax.kernels.implementation import choose_implementation
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
      queries: number of queries, None where it is symbolic.
      keys: number of keys and values, likewise.
      heads: of the queries.
      key_heads: of keys and values.
    """

    reading: Reading
    dtypes: tuple[jnp.dtype, ...]
    dim: int
    value_dim: int
    queries: int | None
    keys: int | None
    heads: int
    key_heads: int

    @classmethod
    def of(cls, reading: Reading, query, key, value) -> Facts:
        """The facts of a call."""
        queries, keys = (
            x.shape[-3] if isinstance(x.shape[-3], int) else None for x in (query, key)
        )
        return cls(
            reading,
            tuple(x.dtype for x in (query, key, value)),
            *(key.shape[-1], value.shape[-1]),
            *(queries, keys),
            *(query.shape[-2], key.shape[-2]),
        )


@dataclasses.dataclass(frozen=True)
class Passes:
    """One implementation: functions as those of `moments`, and one for short sequences.

    Attributes:
      sum_moments: as `moments.sum_moments`.
      sum_moments_backward: as `moments.sum_moments_backward`.
      read_out: as `moments.read_out`.
      read_out_backward: as `moments.read_out_backward`.
      causal: as `causal.causal_read_out`.
      causal_backward: as `causal.causal_read_out_backward`.
      fused: None, or fused(reading, query, key, value, mask, scale) -> (out, sums, key_pivot,
        value_pivot), all in one pass, or None where the sequences are too long for that.
    """

    sum_moments: Callable
    sum_moments_backward: Callable
    read_out: Callable
    read_out_backward: Callable
    causal: Callable
    causal_backward: Callable
    fused: Callable[..., tuple[jax.Array, ...] | None] | None = None


def _xla() -> Passes:
    return Passes(
        moments.sum_moments,
        moments.sum_moments_backward,
        moments.read_out,
        moments.read_out_backward,
        causal.causal_read_out,
        causal.causal_read_out_backward,
    )


#: Name to what makes the passes. Kernels are imported when they are first used.
PASSES: dict[str, Callable[[], Passes]] = {"xla": functools.cache(_xla)}


def choose(implementation: str | None, operation: str, facts: Facts) -> str:
    """The implementation that serves a call, see `choose_implementation`."""
    del facts
    return choose_implementation(implementation, operation, {})


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
        return PASSES[self.implementation]()

    @property
    def needs_one_batch_axis(self) -> bool:
        """Kernels know one batch axis."""
        return self.implementation != "xla"

    def differentiable(self):
        """The same in XLA."""
        return dataclasses.replace(self, implementation="xla")
