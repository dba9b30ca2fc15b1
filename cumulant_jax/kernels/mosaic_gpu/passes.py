"""The GPU kernels as one of the implementations that attention chooses from."""

from __future__ import annotations

import jax.numpy as jnp

from cumulant_jax.kernels.causal import causal_read_out
from cumulant_jax.kernels.device import Device
from cumulant_jax.kernels.mosaic_gpu.feature_parts import feature_parts
from cumulant_jax.kernels.mosaic_gpu.moments import sum_moments
from cumulant_jax.kernels.mosaic_gpu.moments_backward import sum_moments_backward
from cumulant_jax.kernels.mosaic_gpu.read_out import read_out
from cumulant_jax.kernels.mosaic_gpu.read_out_backward import read_out_backward
from cumulant_jax.kernels.passes import Facts, Passes
from cumulant_jax.kernels.token_statistics import StatisticsFacts

DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"))
HOPPER = (9, 0)
WIDEST = 256


def unsupported(facts: Facts, device: Device) -> str | None:
    """Why the GPU kernels cannot serve a call, None where they can."""
    if device.compute_capability != HOPPER:
        return f"needs compute capability 9.0 (Hopper), and this has {device.compute_capability}"
    if facts.is_causal:
        return "has no causal kernel"
    if facts.is_symbolic:
        return "needs sizes that are known, and some are symbolic or zero"
    if len(set(facts.dtypes)) > 1 or facts.dtypes[0] not in DTYPES:
        names = ", ".join(map(str, facts.dtypes))
        return f"needs query, key and value all bfloat16 or all float16, not {names}"
    if feature_parts(facts.reading.features) is None:
        return "has no kernel for these features, which XLA's matrix products serve as well"
    if max(facts.dim, facts.value_dim) > WIDEST:
        return f"takes head dims up to {WIDEST}, not {max(facts.dim, facts.value_dim)}"
    return None


def unsupported_statistics(facts: StatisticsFacts, device: Device) -> str | None:
    """Why the GPU kernels cannot serve token statistics."""
    del facts, device
    return "has no kernel for token statistics"


def passes() -> Passes:
    """The passes."""
    return Passes(
        sum_moments,
        sum_moments_backward,
        read_out,
        read_out_backward,
        causal_read_out,
        lambda facts: False,
    )
