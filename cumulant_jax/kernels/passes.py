"""The passes that every implementation provides, and which implementation serves a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cumulant_jax.kernels import moments
from cumulant_jax.kernels.implementation import choose_implementation
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
    def of(cls, reading: Reading, query, key, value, mask) -> Facts:
        """The facts of a call."""
        del mask
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
      fused: None, or fused(reading, query, key, value, mask, scale) -> (out, sums, key_pivot,
        value_pivot), all in one pass, or None where the sequences are too long for that.
    """

    sum_moments: Callable
    sum_moments_backward: Callable
    read_out: Callable
    read_out_backward: Callable
    fused: Callable[..., tuple[jax.Array, ...] | None] | None = None


def _xla() -> Passes:
    return Passes(
        moments.sum_moments,
        moments.sum_moments_backward,
        moments.read_out,
        moments.read_out_backward,
    )


#: Name to what makes the passes. Kernels are imported when they are first used.
PASSES: dict[str, Callable[[], Passes]] = {"xla": functools.cache(_xla)}


def choose(implementation: str | None, operation: str, facts: Facts) -> str:
    """The implementation that serves a call, see `choose_implementation`."""
    del facts
    return choose_implementation(implementation, operation, {})
