"""Attention as pure functions on [*batch, tokens, heads, dim] arrays."""

from cumulant_jax.attention.cross_covariance import cross_covariance_attention
from cumulant_jax.attention.cumulant import cumulant_attention
from cumulant_jax.attention.kinds import (
    KINDS,
    as_flax_attention_fn,
    attention,
    attention_function,
    check_options,
)
from cumulant_jax.attention.linear import linear_attention
from cumulant_jax.attention.softmax import softmax_attention
from cumulant_jax.attention.token_statistics import (
    TokenStatisticsState,
    token_memberships,
    token_statistics_attention,
)
from cumulant_jax.attention.weights import attention_weights
from cumulant_jax.kernels import MomentState

__all__ = [
    "KINDS",
    "MomentState",
    "TokenStatisticsState",
    "as_flax_attention_fn",
    "attention",
    "attention_function",
    "attention_weights",
    "check_options",
    "cross_covariance_attention",
    "cumulant_attention",
    "linear_attention",
    "softmax_attention",
    "token_memberships",
    "token_statistics_attention",
]
