"""The passes over tokens that the linear-time attention functions are made of."""

from cumulant_jax.kernels.causal import MomentState
from cumulant_jax.kernels.causal_attention import causal_attention, state_shapes
from cumulant_jax.kernels.cumulants import read_out_matrix
from cumulant_jax.kernels.device import Device, assume_device, current_device
from cumulant_jax.kernels.features import PolynomialFeatures, elu1
from cumulant_jax.kernels.implementation import (
    IMPLEMENTATIONS,
    check_implementation,
    choose_implementation,
)
from cumulant_jax.kernels.moment_attention import moment_attention
from cumulant_jax.kernels.moments import accumulation_dtype, masked_mean, read_out, sum_moments
from cumulant_jax.kernels.reading import CumulantReading, NormalizedReading
from cumulant_jax.kernels.token_pass import chunk_length, token_pass
from cumulant_jax.kernels.token_statistics import TokenStatisticsState

__all__ = [
    "IMPLEMENTATIONS",
    "CumulantReading",
    "Device",
    "MomentState",
    "NormalizedReading",
    "PolynomialFeatures",
    "TokenStatisticsState",
    "accumulation_dtype",
    "assume_device",
    "causal_attention",
    "check_implementation",
    "choose_implementation",
    "chunk_length",
    "current_device",
    "elu1",
    "masked_mean",
    "moment_attention",
    "read_out",
    "read_out_matrix",
    "state_shapes",
    "sum_moments",
    "token_pass",
]
