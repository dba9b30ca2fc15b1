"""What the TPU kernels can do: a pure function of shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from cumulant_jax.kernels.features import PolynomialFeatures
from cumulant_jax.kernels.mosaic_tpu.body import lane_features
from cumulant_jax.kernels.mosaic_tpu.layout import LANES, HeadLayout
from cumulant_jax.kernels.mosaic_tpu.tiling import DEFAULT_SIZES

OPERATIONS = ("moments", "fused", "causal", "token_statistics", "causal_token_statistics")

_DTYPES = ("float32", "bfloat16")
_LARGEST_DIM = 256
_LONGEST_FUSED = 512
_LARGEST_WIDTH = 2048
_MOST_STACKED = 16


def unsupported(
    operation: str,
    *,
    dtypes: Sequence[Any],
    heads: int,
    dim: int,
    value_dim: int = 0,
    key_heads: int = 0,
    tokens: int = 0,
    features: Callable | None = None,
) -> str | None:
    """Why the TPU kernels cannot do a call, or None where they can.

    Args:
      operation: one of `OPERATIONS`; "moments" stands for `sum_moments` and `read_out`.
      dtypes: of the tokens.
      heads: number of query heads.
      dim: key dimension.
      value_dim: value dimension; 0 for `dim`.
      key_heads: number of key heads; 0 for `heads`.
      tokens: the larger number of queries or keys.
      features: the feature map, for all but token statistics.

    >>> unsupported("causal", dtypes=["float16"], heads=8, dim=64)
    'float16 tokens: the TPU kernels take float32 and bfloat16'
    """
    value_dim, key_heads = value_dim or dim, key_heads or heads
    reasons = [_wrong_dtype(dtypes)]
    if "token_statistics" in operation:
        reasons.append(_too_wide(heads, dim))
    else:
        layout = HeadLayout(key_heads, dim, value_dim)
        reasons += [_unknown_features(features), _wrong_dims(layout)]
        if operation == "fused":
            reasons.append(_not_short(layout, heads, tokens, jnp.result_type(*dtypes).itemsize))
        if operation == "causal":
            reasons.append(_too_many_stacked(layout, heads))
    return next((reason for reason in reasons if reason), None)


def _wrong_dtype(dtypes) -> str | None:
    names = [jnp.dtype(dtype).name for dtype in dtypes]
    wrong = [name for name in names if name not in _DTYPES]
    return f"{wrong[0]} tokens: the TPU kernels take {' and '.join(_DTYPES)}" if wrong else None


def _unknown_features(features) -> str | None:
    if features is None or lane_features(features) is not None:
        return None
    if isinstance(features, PolynomialFeatures):
        kind = "offdiagonal=True" if features.all_pairs else f"order={features.order}"
        return f"{kind}: the TPU kernels have the diagonal terms of orders 2, 3 and 4"
    return "a feature map that is not elu1, relu or exp"


def _wrong_dims(layout: HeadLayout) -> str | None:
    largest = max(layout.dim, layout.value_dim)
    if largest > _LARGEST_DIM:
        return f"head dimension {largest}: the TPU kernels go up to {_LARGEST_DIM}"
    if max(layout.lanes, layout.value_lanes) > 4 * _LARGEST_DIM:
        return f"keys of {layout.dim} with values of {layout.value_dim}: too different to pack"
    return None


def _not_short(layout: HeadLayout, heads: int, tokens: int, itemsize: int) -> str | None:
    if layout.heads != heads:
        return "grouped heads, which the one-pass kernel does not have"
    size = 7 * tokens * max(layout.lanes, layout.value_lanes) * itemsize
    if tokens > _LONGEST_FUSED or size > DEFAULT_SIZES.fused_bytes:
        return f"{tokens} tokens, too long for the one-pass kernel at these dimensions"
    return None


def _too_many_stacked(layout: HeadLayout, heads: int) -> str | None:
    stacked = layout.packed * (heads // layout.heads)
    if stacked <= _MOST_STACKED:
        return None
    return f"{stacked} query heads per register row of keys: at most {_MOST_STACKED}"


def _too_wide(heads: int, dim: int) -> str | None:
    if heads > LANES:
        return f"{heads} heads: at most {LANES}"
    if heads * dim > _LARGEST_WIDTH:
        return f"{heads} heads of {dim} dims: heads times dims may be {_LARGEST_WIDTH} at most"
    return None
