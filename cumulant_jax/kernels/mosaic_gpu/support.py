"""What the Mosaic GPU kernels support, as reasons to do without them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.moments import Features
from cumulant_jax.kernels.mosaic_gpu.feature_parts import find_parts

DTYPES = ("bfloat16", "float16")
LONGEST_FUSED = 512

# The largest dim of keys and of values. Three blocks of features (order 4) or the normalizer of
# linear attention take registers that wider tiles would need.
_LARGEST_DIM = {
    "sum_moments": 256,
    "read_out": 256,
    "sum_moments_backward": 128,
    "read_out_backward": 128,
    "fused_cumulant": 64,
    "fused_linear": 64,
}
_LARGEST_DIM_ORDER_4 = 64
_LARGEST_DIM_NORMALIZED = 128

# Why a generation other than Hopper cannot run them.
_OTHER_GENERATIONS = {
    7: "these GPUs have neither TMA nor wgmma, and Mosaic GPU does not support them",
    8: "these GPUs have neither TMA nor wgmma",
    10: "these GPUs replaced wgmma by tcgen05, for which there are no kernels yet",
    12: "these GPUs have no wgmma",
}


def unsupported(
    operation: str,
    *,
    features: Features,
    dtypes: Sequence[jax.typing.DTypeLike],
    dim: int,
    value_dim: int,
    lengths: Sequence[int],
    compute_capability: str,
    groups: int = 1,
) -> str | None:
    """Why the kernels cannot do an operation, or None where they can.

    Args:
      operation: "sum_moments", "read_out", "sum_moments_backward", "read_out_backward",
        "fused_cumulant" or "fused_linear".
      features: the feature map.
      dtypes: those of query, key and value.
      dim: dimension of queries and keys.
      value_dim: dimension of the values.
      lengths: the numbers of tokens (of queries, of keys).
      compute_capability: of the device, such as "9.0".
      groups: query heads per key head.

    Returns:
      A reason that completes "… cannot run on mosaic_gpu: …".

    >>> from cumulant_jax.kernels import PolynomialFeatures
    >>> unsupported("sum_moments", features=PolynomialFeatures(3), dtypes=("float32",), dim=64,
    ...             value_dim=64, lengths=(197,), compute_capability="9.0")
    'it takes bfloat16 or float16, the same for all arrays, not float32'
    """
    if operation not in _LARGEST_DIM:
        return f"there is no kernel for {operation}"
    if compute_capability != "9.0":
        generation = int(compute_capability.split(".")[0])
        reason = _OTHER_GENERATIONS.get(generation, "they are not known to have wgmma")
        return f"it needs compute capability 9.0 (Hopper), not {compute_capability}: {reason}"
    parts = find_parts(features)
    if parts is None:
        return (
            f"it takes monomials of order 2 to 4 without pairs, elu1, relu or exp, not {features}"
        )
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    if len(names) > 1 or not names <= set(DTYPES):
        given = ", ".join(sorted(names))
        return f"it takes bfloat16 or float16, the same for all arrays, not {given}"
    largest = _LARGEST_DIM[operation]
    if len(parts.values) > 2:
        largest = min(largest, _LARGEST_DIM_ORDER_4)
    if operation == "read_out" and not parts.constant:
        largest = min(largest, _LARGEST_DIM_NORMALIZED)
    if max(dim, value_dim) > largest:
        return f"it takes dims up to {largest} for these features, not {dim} and {value_dim}"
    if min(lengths) < 1:
        return "it needs at least one token"
    if operation.startswith("fused"):
        if groups != 1:
            return f"it fuses heads of their own only, not groups of {groups}"
        if max(lengths) > LONGEST_FUSED:
            return f"it fuses up to {LONGEST_FUSED} tokens, not {max(lengths)}"
        if parts.constant != (operation == "fused_cumulant"):
            return f"{operation} does not go with {features}"
    return None
