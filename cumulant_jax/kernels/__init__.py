"""The passes over tokens that the linear-time attention functions are made of."""

from cumulant_jax.kernels.causal import MomentState, causal_read_out, empty_state
from cumulant_jax.kernels.cumulants import effective_features, read_out_matrix
from cumulant_jax.kernels.features import PolynomialFeatures, elu1
from cumulant_jax.kernels.implementation import IMPLEMENTATIONS, choose_implementation
from cumulant_jax.kernels.moments import accumulation_dtype, masked_mean, read_out, sum_moments
from cumulant_jax.kernels.token_pass import chunk_length, token_pass

__all__ = [
    "IMPLEMENTATIONS",
    "MomentState",
    "PolynomialFeatures",
    "accumulation_dtype",
    "causal_read_out",
    "choose_implementation",
    "chunk_length",
    "effective_features",
    "elu1",
    "empty_state",
    "masked_mean",
    "read_out",
    "read_out_matrix",
    "sum_moments",
    "token_pass",
]
