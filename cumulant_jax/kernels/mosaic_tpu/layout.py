"""How heads share lanes, and how the tokens are cut into blocks.

A TPU register row has 128 lanes and its matrix unit is 128 wide, while a head is often 64 wide. The
arrays are taken as [batch, tokens, heads · dim], which costs nothing (that is how a projection
leaves them), and as many heads as fill 128 lanes form one *group*. A group is treated as one head
of 128 dims: the products between different heads, which come out beside the wanted ones, are zeroed
where they would matter. So no lane is ever moved. Dims that neither divide 128 nor are a multiple
of it are padded with zeros, which costs one copy of the array and the padded share of every pass
(24 → 32, 48 → 64, 80 and 100 → 128, 200 → 256).

Matrices are kept with the values on rows and the features on lanes, [value lanes, degree · key
lanes], so that only the values are transposed on the way into the matrix unit and everything that
belongs to a feature (its mean, the scale) is a row.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128


def lane_dim(dim: int) -> int:
    """The smallest divisor or multiple of the register width that holds `dim`, at least 8."""
    if dim >= LANES:
        return pl.cdiv(dim, LANES) * LANES
    return max(8, 1 << (dim - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Heads of `dim` (values of `value_dim`) packed into groups of lanes.

    Attributes:
      heads: number of heads.
      dim: dimension of keys and queries.
      value_dim: dimension of values.
    """

    heads: int
    dim: int
    value_dim: int

    @property
    def head_lanes(self) -> int:
        """Lanes of one head's keys."""
        return lane_dim(self.dim)

    @property
    def head_value_lanes(self) -> int:
        """Lanes of one head's values."""
        return lane_dim(self.value_dim)

    @property
    def packed(self) -> int:
        """Heads in a group."""
        fill = max(LANES // min(self.head_lanes, self.head_value_lanes), 1)
        return min(fill, self.heads)

    @property
    def groups(self) -> int:
        """Groups of heads; the last may be partly empty."""
        return pl.cdiv(self.heads, self.packed)

    @property
    def lanes(self) -> int:
        """Lanes of a group's keys."""
        return self.packed * self.head_lanes

    @property
    def value_lanes(self) -> int:
        """Lanes of a group's values."""
        return self.packed * self.head_value_lanes

    def same_head(self) -> jax.Array:
        """[value_lanes, lanes], True where row and lane belong to one head; for kernels."""
        shape = (self.value_lanes, self.lanes)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        return _divide(row, self.head_value_lanes) == _divide(lane, self.head_lanes)

    def own_lanes(self, tokens: int) -> jax.Array | None:
        """[tokens, lanes], True but in the padding of a head's keys; None if there is none."""
        if self.dim == self.head_lanes:
            return None
        lane = lax.broadcasted_iota(jnp.int32, (tokens, self.lanes), 1)
        return lane - _divide(lane, self.head_lanes) * self.head_lanes < self.dim

    def pack_keys(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, heads, dim] to [batch, tokens, all lanes]."""
        return _to_lanes(x, self.head_lanes)

    def pack_values(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, heads, value_dim] to [batch, tokens, all lanes]."""
        return _to_lanes(x, self.head_value_lanes)

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of `pack_keys`."""
        return _from_lanes(x, self.heads, self.dim)

    def unpack_values(self, x: jax.Array) -> jax.Array:
        """The inverse of `pack_values`."""
        return _from_lanes(x, self.heads, self.value_dim)

    def pack_matrix(self, matrix: jax.Array) -> jax.Array:
        """[batch, heads, degree · dim, value_dim] to [batch, groups, value_lanes, …lanes]."""
        batch, _, rows, _ = matrix.shape
        degree = rows // self.dim
        x = matrix.astype(jnp.float32).reshape(batch, self.heads, degree, self.dim, self.value_dim)
        spare = self.groups * self.packed - self.heads
        padding = [(0, spare), (0, 0), (0, self.head_lanes - self.dim)]
        x = jnp.pad(x, [(0, 0), *padding, (0, self.head_value_lanes - self.value_dim)])
        x = x.reshape(batch, self.groups, self.packed, *x.shape[2:])
        x = jnp.transpose(x, (0, 1, 2, 5, 3, 4))[..., None, :]
        x = jnp.where(self._diagonal(), x, 0)
        return x.reshape(batch, self.groups, self.value_lanes, degree * self.lanes)

    def unpack_matrix(self, x: jax.Array) -> jax.Array:
        """The inverse of `pack_matrix`; what lies between different heads is dropped."""
        batch, degree = x.shape[0], x.shape[-1] // self.lanes
        sizes = (self.packed, self.head_value_lanes, degree, self.packed, self.head_lanes)
        x = x.reshape(batch, self.groups, *sizes)
        x = jnp.sum(jnp.where(self._diagonal(), x, 0), axis=-2)
        x = jnp.transpose(x, (0, 1, 2, 4, 5, 3))
        x = x.reshape(batch, self.groups * self.packed, *x.shape[3:])
        x = x[:, : self.heads, :, : self.dim, : self.value_dim]
        return x.reshape(batch, self.heads, degree * self.dim, self.value_dim)

    def pack_rows(self, x: jax.Array, *, values: bool) -> jax.Array:
        """[batch, heads, degree · dim] to [batch, groups, 1, degree · lanes]."""
        dim, lanes = self._dims(values)
        degree = x.shape[-1] // dim
        x = x.astype(jnp.float32).reshape(*x.shape[:2], degree, dim)
        spare = self.groups * self.packed - self.heads
        x = jnp.pad(x, [(0, 0), (0, spare), (0, 0), (0, lanes - dim)])
        x = x.reshape(x.shape[0], self.groups, self.packed, degree, lanes)
        x = jnp.swapaxes(x, 2, 3)
        return x.reshape(x.shape[0], self.groups, 1, degree * self.packed * lanes)

    def spread_rows(self, x: jax.Array, *, values: bool) -> jax.Array:
        """[batch, heads] to [batch, groups, 1, lanes]: a head's number in all lanes it has."""
        lanes = self._dims(values)[1]
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, self.groups * self.packed - self.heads)])
        x = x.reshape(x.shape[0], self.groups, 1, self.packed)
        return jnp.repeat(x, lanes, axis=-1)

    def unpack_rows(self, x: jax.Array, *, values: bool) -> jax.Array:
        """The inverse of `pack_rows`."""
        dim, lanes = self._dims(values)
        degree = x.shape[-1] // (self.packed * lanes)
        x = x.reshape(x.shape[0], self.groups, degree, self.packed, lanes)
        x = jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, degree, lanes)
        return x[:, : self.heads, :, :dim].reshape(x.shape[0], self.heads, degree * dim)

    def pack_mask(self, mask: jax.Array) -> jax.Array:
        """Bool [batch, tokens, heads or 1] to float32 rows [batch, groups or 1, heads, tokens].

        Tokens lie along the lanes, where a bit per token costs four bytes and not a register row.
        """
        rows = jnp.swapaxes(mask, 1, 2).astype(jnp.float32)
        if rows.shape[1] == 1:
            return rows[:, None]
        rows = jnp.pad(rows, [(0, 0), (0, self.groups * self.packed - self.heads), (0, 0)])
        return rows.reshape(rows.shape[0], self.groups, self.packed, rows.shape[-1])

    def _dims(self, values: bool) -> tuple[int, int]:
        if values:
            return self.value_dim, self.head_value_lanes
        return self.dim, self.head_lanes

    def _diagonal(self) -> jax.Array:
        """[packed, 1, 1, packed, 1], True where both stand for the same head."""
        return jnp.eye(self.packed, dtype=bool)[:, None, None, :, None]


def _to_lanes(x: jax.Array, lanes: int) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, lanes - x.shape[-1])])
    return x.reshape(*x.shape[:2], x.shape[2] * lanes)


def _from_lanes(x: jax.Array, heads: int, dim: int) -> jax.Array:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)[..., :dim]


def head_of_lane(shape: tuple[int, ...], head_lanes: int) -> jax.Array:
    """The index, within its group, of the head that each lane of [tokens, lanes] belongs to."""
    return _divide(lax.broadcasted_iota(jnp.int32, shape, 1), head_lanes)


def _divide(x: jax.Array, y: int) -> jax.Array:
    """X // y for non-negative integers, without the sign handling that kernels cannot lower."""
    return lax.div(x, jnp.full_like(x, y))


def within(shape: tuple[int, ...], axis: int, start, stop: int) -> jax.Array:
    """True where `start` plus the position along `axis` is below `stop`."""
    return start + lax.broadcasted_iota(jnp.int32, shape, axis) < stop


def spread(rows: jax.Array, lanes: int) -> jax.Array:
    """Rows [heads, tokens] to columns [tokens, lanes], each head's number in all of its lanes."""
    heads, tokens = rows.shape
    tall = [jnp.broadcast_to(rows[h : h + 1], (lanes // heads, tokens)) for h in range(heads)]
    return jnp.transpose(jnp.concatenate(tall, axis=0))


def all_of(*conditions: jax.Array | None) -> jax.Array | None:
    """The conjunction of the conditions that are not None, None for none."""
    given = [condition for condition in conditions if condition is not None]
    return functools.reduce(operator.and_, given) if given else None


def keep(x: jax.Array, condition: jax.Array | None) -> jax.Array:
    """`x` where the condition holds and 0 elsewhere, whatever is there (NaN included)."""
    return x if condition is None else jnp.where(condition, x, 0)
