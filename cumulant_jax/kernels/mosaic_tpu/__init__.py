"""The passes over tokens as Mosaic TPU kernels, without derivatives: forward and backward."""

from cumulant_jax.kernels.mosaic_tpu.fused import (
    fused_cumulant,
    fused_cumulant_backward,
    fused_linear,
    fused_linear_backward,
)
from cumulant_jax.kernels.mosaic_tpu.moments import sum_moments, sum_moments_backward
from cumulant_jax.kernels.mosaic_tpu.read_out import read_out, read_out_backward
from cumulant_jax.kernels.mosaic_tpu.tiling import BlockSizes, block_sizes

__all__ = [
    "BlockSizes",
    "block_sizes",
    "fused_cumulant",
    "fused_cumulant_backward",
    "fused_linear",
    "fused_linear_backward",
    "read_out",
    "read_out_backward",
    "sum_moments",
    "sum_moments_backward",
]
