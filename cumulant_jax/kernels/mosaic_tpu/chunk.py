"""One chunk of the causal pass, for one group of key heads: plain functions of arrays in VMEM.

Every query reads the tokens of its own chunk up to itself, by a small dense product, and all tokens
before the chunk through the carried moments. The heads of a group, and the query heads that share
them, are stacked along the rows, so that the keys enter the matrix unit once.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.mosaic_tpu.algebra import effective_query
from cumulant_jax.kernels.mosaic_tpu.body import (
    LaneFeatures,
    Moments,
    dot,
    reciprocal,
    rounded,
)
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout, head_of_lane


class Tokens(NamedTuple):
    """The tokens of a chunk.

    Attributes:
      queries: one array for each query head of a key head, [tokens, lanes].
      key: [tokens, lanes], about the pivot, 0 where not valid.
      value: [tokens, value_lanes], likewise.
    """

    queries: tuple[jax.Array, ...]
    key: jax.Array
    value: jax.Array


class Facts(NamedTuple):
    """What is known about a chunk and is not differentiated.

    Attributes:
      valid: bool [tokens, lanes], or None where every key is valid.
      key_count: number of tokens up to each one, [tokens, lanes].
      value_count: the same, [tokens, value_lanes].
      value_pivot: [1, value_lanes].
    """

    valid: jax.Array | None
    key_count: jax.Array
    value_count: jax.Array
    value_pivot: jax.Array


@dataclasses.dataclass(frozen=True)
class Cumulant:
    """The rule of the cumulant expansion."""

    features: LaneFeatures
    reduction_is_sum: bool

    def __call__(
        self, layout: HeadLayout, dtype, facts: Facts, carry: Moments, tokens: Tokens, scale
    ) -> tuple[tuple[jax.Array, ...], Moments]:
        """The outputs of each query head [tokens, value_lanes], and the moments after the chunk."""
        key, value, running, after = _advance(self.features, layout, dtype, facts, carry, tokens)
        share = 1 / jnp.maximum(facts.key_count, 1)
        means = [x * share for x in jnp.split(running, self.features.degree, axis=1)]
        weights, constants = [], []
        for query in tokens.queries:
            parts, terms = effective_query(scale * query, means)
            # The lanes of a head add up to its constant, 1 + Σ terms.
            terms = terms + 1 / layout.head_lanes
            if not self.reduction_is_sum:
                parts, terms = [x * share for x in parts], terms * share
            weights.append(parts)
            constants.append(_sum_heads(layout, terms))
        scores = _scores(layout, dtype, weights, key, constants)
        inside = _apply_scores(layout, dtype, scores, value, len(weights))
        before = _read_carry(dtype, weights, carry.matrix)
        pivot = facts.value_pivot * jnp.where(
            facts.value_count > 0, facts.value_count if self.reduction_is_sum else 1.0, 0.0
        )
        outs = [
            x + y + _to_value_lanes(layout, c) * carry.values + pivot
            for x, y, c in zip(inside, before, constants, strict=True)
        ]
        return tuple(outs), after


@dataclasses.dataclass(frozen=True)
class Linear:
    """The rule of linear attention."""

    features: LaneFeatures
    eps: float

    def __call__(
        self, layout: HeadLayout, dtype, facts: Facts, carry: Moments, tokens: Tokens, scale
    ) -> tuple[tuple[jax.Array, ...], Moments]:
        """The outputs of each query head [tokens, value_lanes], and the moments after the chunk."""
        del scale
        key, value, _, after = _advance(self.features, layout, dtype, facts, carry, tokens)
        weights = [[self.features(query, dtype)] for query in tokens.queries]
        scores = rounded(_scores(layout, dtype, weights, key, None), dtype)
        inside = _apply_scores(layout, dtype, scores, value, len(weights))
        before = _read_carry(dtype, weights, carry.matrix)
        normalizer = jnp.where(layout.same_head(), carry.features, 0)
        norms_before = _read_carry(dtype, weights, normalizer)
        norms_inside = jnp.sum(scores, axis=1, keepdims=True)
        columns = _split_rows(norms_inside, len(weights) * layout.packed)
        outs = []
        for g, (x, y, norm) in enumerate(zip(inside, before, norms_before, strict=True)):
            heads = columns[g * layout.packed : (g + 1) * layout.packed]
            norm = norm + _to_value_lanes(layout, heads)
            outs.append((x + y) * reciprocal(norm + self.eps))
        return tuple(outs), after


def advance(
    features: LaneFeatures, layout: HeadLayout, dtype, facts: Facts, carry: Moments, key, value
) -> Moments:
    """The moments after a chunk alone, for the backward pass to find its states again."""
    tokens = Tokens((), key, value)
    return _advance(features, layout, dtype, facts, carry, tokens)[-1]


def _advance(features, layout, dtype, facts, carry: Moments, tokens: Tokens):
    """Key features, values, the sums of the features up to each token, the moments after all."""
    key = features(tokens.key, dtype, facts.valid)
    value = rounded(tokens.value, dtype)
    length = key.shape[0]
    lower = _row(length, length) >= _column(length, length)
    running = carry.features + dot(lower.astype(jnp.float32), key, (1, 0), dtype)
    update = jnp.where(_wide_same_head(layout, features), dot(value, key, (0, 0), dtype), 0)
    after = Moments(
        carry.matrix + update,
        carry.features + jnp.sum(key, axis=0, keepdims=True),
        carry.values + jnp.sum(value, axis=0, keepdims=True),
    )
    return key, value, running, after


def _wide_same_head(layout: HeadLayout, features: LaneFeatures) -> jax.Array:
    same = layout.same_head()
    # Joined as numbers: the vector unit does not join masks.
    same = jnp.concatenate([same.astype(jnp.float32)] * features.degree, axis=1)
    return same > 0.5


def _scores(layout: HeadLayout, dtype, weights, key, constants) -> jax.Array:
    """[query heads · packed · tokens, tokens], zero for keys after the query."""
    length = key.shape[0]
    rows = []
    for parts in weights:
        for head in range(layout.packed):
            rows.append(jnp.concatenate([_only(layout, head, x) for x in parts], axis=1))
    scores = dot(jnp.concatenate(rows, axis=0), key, (1, 1), dtype)
    if constants is not None:
        scores = scores + jnp.concatenate([c for heads in constants for c in heads], axis=0)
    positions = jnp.concatenate([_row(length, length)] * len(rows), axis=0)
    return jnp.where(positions >= _column(positions.shape[0], length), scores, 0)


def _apply_scores(layout: HeadLayout, dtype, scores, value, queries: int) -> list[jax.Array]:
    """Scores times values; [tokens, value_lanes] for each query head."""
    products = _split_rows(dot(scores, value, (1, 0), dtype), queries * layout.packed)
    return [
        _to_value_lanes(layout, products[g * layout.packed : (g + 1) * layout.packed])
        for g in range(queries)
    ]


def _read_carry(dtype, weights, matrix) -> list[jax.Array]:
    """What the moments before the chunk give; [tokens, value_lanes] for each query head."""
    rows = jnp.concatenate([jnp.concatenate(parts, axis=1) for parts in weights], axis=0)
    return _split_rows(dot(rows, matrix, (1, 1), dtype), len(weights))


def _only(layout: HeadLayout, head: int, x: jax.Array) -> jax.Array:
    """`x` [tokens, lanes] with the lanes of other heads set to 0."""
    if layout.packed == 1:
        return x
    return jnp.where(head_of_lane(x.shape, layout.head_lanes) == head, x, 0)


def _sum_heads(layout: HeadLayout, x: jax.Array) -> list[jax.Array]:
    """Sums over the lanes of each head, [tokens, 1]."""
    return [
        jnp.sum(_only(layout, head, x), axis=1, keepdims=True) for head in range(layout.packed)
    ]


def _to_value_lanes(layout: HeadLayout, heads: list[jax.Array]) -> jax.Array:
    """Takes each head's lanes from the array (or column) of that head: [tokens, value_lanes]."""
    shape = (heads[0].shape[0], layout.value_lanes)
    out = jnp.broadcast_to(heads[0], shape)
    for head, x in enumerate(heads[1:], 1):
        out = jnp.where(head_of_lane(shape, layout.head_value_lanes) >= head, x, out)
    return out


def _split_rows(x: jax.Array, parts: int) -> list[jax.Array]:
    return jnp.split(x, parts, axis=0)


def _row(rows: int, columns: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 0)


def _column(rows: int, columns: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
