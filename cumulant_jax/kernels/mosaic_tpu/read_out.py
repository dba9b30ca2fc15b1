"""Reading moments out with the queries, and the backward pass of that."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_tpu import body
from cumulant_jax.kernels.mosaic_tpu.body import LaneFeatures, ReadOut
from cumulant_jax.kernels.mosaic_tpu.layout import HeadLayout
from cumulant_jax.kernels.mosaic_tpu.tiling import BlockSizes, Tiling, call, load, store


def read_out(
    features: Features,
    query: jax.Array,
    matrix: jax.Array,
    normalizer_eps: float | None = None,
    *,
    block_sizes: BlockSizes = BlockSizes(),
) -> jax.Array:
    """Reads moments out with the queries: features(query) @ matrix.

    Args:
      features: feature map from dim to `features`.
      query: [batch, tokens, heads, dim].
      matrix: [batch, heads or fewer, features, columns]; query heads in equal groups share one.
      normalizer_eps: if given, the last column is a normalizer: the others are divided by it plus
        this constant.
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      [batch, tokens, heads, columns] (one column fewer with a normalizer) in the query's dtype.
    """
    maps = body.known_features(features)
    weights, layout = _pack(maps, query, matrix, normalizer_eps)
    tiling = _tiling(query, layout, block_sizes, split=False)
    queries = layout.pack_keys(query)
    shape = (*queries.shape[:2], layout.heads * layout.head_value_lanes)
    out = call(
        functools.partial(_read_kernel, maps, tiling, query.dtype, normalizer_eps),
        jax.ShapeDtypeStruct(shape, query.dtype),
        name="read_out",
        grid=tiling.grid,
        in_specs=(tiling.per_token(layout.lanes), _specs(tiling, weights)),
        out_specs=tiling.per_token(layout.value_lanes),
        sequential=0,
        flops=tiling.flops(2 * maps.degree),
    )(queries, weights)
    return layout.unpack_values(out)


def read_out_backward(
    features: Features,
    query: jax.Array,
    matrix: jax.Array,
    normalizer_eps: float | None,
    out_bar: jax.Array,
    *,
    block_sizes: BlockSizes = BlockSizes(),
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of queries and matrix, in one pass that reads query and out_bar once.

    Args:
      features: as for `read_out`, and so on.
      query: [batch, tokens, heads, dim].
      matrix: [batch, heads or fewer, features, columns].
      normalizer_eps: None or the constant added to the normalizer.
      out_bar: [batch, tokens, heads, columns] (one column fewer with a normalizer).
      block_sizes: sizes of the blocks in VMEM.

    Returns:
      The cotangent of query, and that of the matrix of every query head, float32 [batch, heads,
      features, columns].
    """
    maps = body.known_features(features)
    weights, layout = _pack(maps, query, matrix, normalizer_eps)
    tiling = _tiling(query, layout, block_sizes, split=True)
    queries = layout.pack_keys(query)
    bars = jax.tree.map(lambda x: tiling.partial_shape(*x.shape[2:]), weights)
    query_bar, bars = call(
        functools.partial(_backward_kernel, maps, tiling, query.dtype, normalizer_eps),
        (jax.ShapeDtypeStruct(queries.shape, queries.dtype), bars),
        name="read_out_backward",
        grid=tiling.grid,
        in_specs=(
            tiling.per_token(layout.lanes),
            tiling.per_token(layout.value_lanes),
            _specs(tiling, weights),
        ),
        out_specs=(
            tiling.per_token(layout.lanes),
            jax.tree.map(lambda x: tiling.partial(*x.shape[2:]), weights),
        ),
        sequential=1,
        flops=tiling.flops(6 * maps.degree),
    )(queries, layout.pack_values(out_bar), weights)
    bars = jax.tree.map(lambda x: jnp.sum(x, axis=0), bars)
    return layout.unpack_keys(query_bar), _unpack(layout, bars)


def _tiling(query, layout, sizes, *, split):
    batch, length = query.shape[:2]
    return Tiling.choose(layout, batch, length, query.dtype, sizes, split=split)


def _pack(
    maps: LaneFeatures, query: jax.Array, matrix: jax.Array, eps: float | None
) -> tuple[ReadOut, HeadLayout]:
    heads, dim = query.shape[2:]
    repeats = heads // matrix.shape[1]
    if repeats > 1:
        matrix = jnp.repeat(matrix, repeats, axis=1)
    normalizer = None
    if eps is not None:
        matrix, normalizer = matrix[..., :-1], matrix[..., -1:]
    layout = HeadLayout(heads, dim, matrix.shape[-1])
    constant = None
    if maps.constant:
        constant = layout.pack_rows(matrix[..., -1, :], values=True)
        matrix = matrix[..., :-1, :]
    if normalizer is not None:
        normalizer = layout.pack_matrix(jnp.broadcast_to(normalizer, matrix.shape))
    return ReadOut(layout.pack_matrix(matrix), constant, normalizer), layout


def _unpack(layout: HeadLayout, bars: ReadOut) -> jax.Array:
    matrix = layout.unpack_matrix(bars.matrix)
    if bars.constant is not None:
        constant = layout.unpack_rows(bars.constant, values=True)
        matrix = jnp.concatenate([matrix, constant[..., None, :]], axis=-2)
    if bars.normalizer is not None:
        normalizer = jnp.sum(layout.unpack_matrix(bars.normalizer), axis=-1, keepdims=True)
        matrix = jnp.concatenate([matrix, normalizer], axis=-1)
    return matrix


def _specs(tiling: Tiling, weights: ReadOut):
    return jax.tree.map(lambda x: tiling.per_group(*x.shape[2:]), weights)


def _group(weights: ReadOut, group: int) -> ReadOut:
    return jax.tree.map(lambda ref: ref[0, group], weights)


def _read_kernel(
    features: LaneFeatures, tiling: Tiling, dtype, eps, query_ref, weights: ReadOut, out_ref
):
    layout = tiling.layout
    for group in range(tiling.step_groups):
        valid = tiling.valid_lanes(group, layout.lanes)
        query = load(query_ref, group, layout.lanes, valid)
        out = body.read_out(features, dtype, eps, query, _group(weights, group))
        store(out_ref, group, layout.value_lanes, out)


def _backward_kernel(
    features: LaneFeatures,
    tiling: Tiling,
    dtype,
    eps,
    query_ref,
    out_bar_ref,
    weights: ReadOut,
    query_bar_ref,
    bars: ReadOut,
):
    @pl.when(pl.program_id(3) == 0)
    def _():
        for ref in jax.tree.leaves(bars):
            ref[...] = jnp.zeros_like(ref)

    layout = tiling.layout
    for group in range(tiling.step_groups):
        # A query beyond the end, or of no head, must be a number: it meets the sums of the others.
        valid = tiling.valid(group, layout.lanes)
        query = load(query_ref, group, layout.lanes, valid)
        valid = tiling.valid(group, layout.value_lanes)
        out_bar = load(out_bar_ref, group, layout.value_lanes, valid)
        _, pull = jax.vjp(
            functools.partial(body.read_out, features, dtype, eps), query, _group(weights, group)
        )
        query_bar, parts = pull(out_bar)
        store(query_bar_ref, group, layout.lanes, query_bar)
        jax.tree.map(functools.partial(_accumulate, group), bars, parts)


def _accumulate(group: int, ref, x: jax.Array) -> None:
    ref[0, group] += x
