"""The passes over tokens as Mosaic TPU kernels, without derivatives: forward and backward."""

from cumulant_jax.kernels.mosaic_tpu.causal import (
    causal_cumulant,
    causal_cumulant_backward,
    causal_linear,
    causal_linear_backward,
)
from cumulant_jax.kernels.mosaic_tpu.causal_token_statistics import (
    causal_token_statistics,
    causal_token_statistics_backward,
)
from cumulant_jax.kernels.mosaic_tpu.fused import (
    fused_cumulant,
    fused_cumulant_backward,
    fused_linear,
    fused_linear_backward,
)
from cumulant_jax.kernels.mosaic_tpu.moments import sum_moments, sum_moments_backward
from cumulant_jax.kernels.mosaic_tpu.read_out import read_out, read_out_backward
from cumulant_jax.kernels.mosaic_tpu.support import unsupported
from cumulant_jax.kernels.mosaic_tpu.tiling import BlockSizes, block_sizes
from cumulant_jax.kernels.mosaic_tpu.token_statistics import (
    token_statistics,
    token_statistics_backward,
)

__all__ = [
    "BlockSizes",
    "block_sizes",
    "causal_cumulant",
    "causal_cumulant_backward",
    "causal_linear",
    "causal_linear_backward",
    "causal_token_statistics",
    "causal_token_statistics_backward",
    "fused_cumulant",
    "fused_cumulant_backward",
    "fused_linear",
    "fused_linear_backward",
    "read_out",
    "read_out_backward",
    "sum_moments",
    "sum_moments_backward",
    "token_statistics",
    "token_statistics_backward",
    "unsupported",
]
