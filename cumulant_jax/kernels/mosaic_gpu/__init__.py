"""The moment passes as Mosaic GPU kernels for Hopper: TMA, wgmma, float32 accumulation."""

from cumulant_jax.kernels.mosaic_gpu.fused import fused_cumulant, fused_linear
from cumulant_jax.kernels.mosaic_gpu.moments import split_moments, sum_moments
from cumulant_jax.kernels.mosaic_gpu.moments_backward import sum_moments_backward
from cumulant_jax.kernels.mosaic_gpu.read_out import read_out
from cumulant_jax.kernels.mosaic_gpu.read_out_backward import read_out_backward
from cumulant_jax.kernels.mosaic_gpu.support import unsupported

__all__ = [
    "fused_cumulant",
    "fused_linear",
    "read_out",
    "read_out_backward",
    "split_moments",
    "sum_moments",
    "sum_moments_backward",
    "unsupported",
]
