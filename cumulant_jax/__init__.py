"""Linear-time attention for vision from token statistics: cumulant attention and ToST."""

from cumulant_jax import models
from cumulant_jax.attention import (
    as_flax_attention_fn,
    attention,
    attention_weights,
    cross_covariance_attention,
    cumulant_attention,
    linear_attention,
    softmax_attention,
    token_memberships,
    token_statistics_attention,
)

__all__ = [
    "as_flax_attention_fn",
    "attention",
    "attention_weights",
    "cross_covariance_attention",
    "cumulant_attention",
    "linear_attention",
    "models",
    "softmax_attention",
    "token_memberships",
    "token_statistics_attention",
]
