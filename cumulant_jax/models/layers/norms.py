"""Normalisation layers with the settings all models share."""

from typing import Any

import jax.numpy as jnp
from flax import nnx


def layer_norm(
    features: int,
    *,
    eps: float,
    bias: bool = True,
    dtype: jnp.dtype,
    param_dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.LayerNorm:
    """LayerNorm over the last axis, its statistics in float32 at least and in two passes.

    Flax's default variance, E[x^2] - E[x]^2, loses all digits when the mean is large against the
    spread.
    """
    return nnx.LayerNorm(
        features,
        epsilon=eps,
        use_bias=bias,
        dtype=dtype,
        param_dtype=param_dtype,
        use_fast_variance=False,
        rngs=rngs,
    )


def rms_norm(
    features: int, *, eps: float, dtype: jnp.dtype, param_dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.RMSNorm:
    """RMSNorm over the last axis (arXiv 1910.07467), its statistics in float32 at least."""
    return nnx.RMSNorm(features, epsilon=eps, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


#: Name of a normalisation of queries and keys to the function that builds it.
QK_NORMS: dict[str, Any] = {"layer": layer_norm, "rms": rms_norm}
