"""The GPU kernels as one of the implementations that attention chooses from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cumulant_jax.kernels import moments
from cumulant_jax.kernels.causal import causal_read_out
from cumulant_jax.kernels.device import Device, current_device
from cumulant_jax.kernels.mosaic_gpu import (
    fused_cumulant,
    fused_linear,
    read_out,
    read_out_backward,
    sum_moments,
    sum_moments_backward,
    support,
)
from cumulant_jax.kernels.passes import Facts, Passes
from cumulant_jax.kernels.reading import CumulantReading, Reading
from cumulant_jax.kernels.token_statistics import StatisticsFacts

#: What `experiments.benchmark --tune` tries.
CANDIDATES = {"blocks": (132, 264, 396, 528, 792), "fewest_tiles": (2, 4, 8)}


def unsupported(facts: Facts, device: Device) -> str | None:
    """Why the GPU kernels cannot serve a call, None where they can."""
    if facts.is_causal:
        return "has no causal kernel"
    if facts.is_symbolic:
        return "needs sizes that are known, and some are symbolic or zero"
    reasons = (_reason(operation, facts, device) for operation in ("sum_moments", "read_out"))
    return next((f"cannot: {reason}" for reason in reasons if reason), None)


def unsupported_statistics(facts: StatisticsFacts, device: Device) -> str | None:
    """Why the GPU kernels cannot serve token statistics."""
    del facts, device
    return "has no kernel for token statistics"


def passes() -> Passes:
    """The passes. Backward passes over wide heads are XLA's."""
    return Passes(
        sum_moments,
        _sum_moments_backward,
        read_out,
        _read_out_backward,
        causal_read_out,
        _fits,
        _fused,
    )


def _reason(operation: str, facts: Facts, device: Device) -> str | None:
    if device.compute_capability is None:
        return f"it needs an NVIDIA GPU, and this is a {device.kind}"
    return support.unsupported(
        operation,
        features=facts.reading.features,
        dtypes=facts.dtypes,
        dim=facts.dim,
        value_dim=facts.value_dim,
        lengths=(facts.queries, facts.keys),
        compute_capability="{}.{}".format(*device.compute_capability),
        groups=facts.heads // facts.key_heads,
    )


def _fits(facts: Facts) -> bool:
    is_cumulant = isinstance(facts.reading, CumulantReading)
    operation = "fused_cumulant" if is_cumulant else "fused_linear"
    return _reason(operation, facts, current_device()) is None


def _sum_moments_backward(features, key, value, mask, *, key_pivot, value_pivot, sums_bar):
    options = {"key_pivot": key_pivot, "value_pivot": value_pivot, "sums_bar": sums_bar}
    if _serves("sum_moments_backward", features, key, value):
        return sum_moments_backward(features, key, value, mask, **options)
    return moments.sum_moments_backward(features, key, value, mask, **options)


def _read_out_backward(features, query, matrix, *, normalizer_eps, out_bar):
    options = {"normalizer_eps": normalizer_eps, "out_bar": out_bar}
    if _serves("read_out_backward", features, query, out_bar):
        return read_out_backward(features, query, matrix, **options)
    return moments.read_out_backward(features, query, matrix, **options)


def _serves(operation: str, features, tokens: jax.Array, values: jax.Array) -> bool:
    reason = support.unsupported(
        operation,
        features=features,
        dtypes=(tokens.dtype,),
        dim=tokens.shape[-1],
        value_dim=values.shape[-1],
        lengths=(tokens.shape[1],),
        compute_capability="9.0",  # `unsupported` saw to it
    )
    return reason is None


def _fused(reading: Reading, query, key, value, mask, scale, *, keep: bool) -> tuple[Any, ...]:
    arrays = (query, key, value, mask)
    if isinstance(reading, CumulantReading):
        options = {"reduction_is_sum": reading.reduction_is_sum, "return_sums": keep}
        return fused_cumulant(reading.features, *arrays, scale, **options)
    arrays = (reading.features, *arrays)
    out, sums = fused_linear(*arrays, normalizer_eps=reading.normalizer_eps, return_sums=keep)
    pivots = (jnp.zeros((*x.shape[:1], *x.shape[2:]), jnp.float32) for x in (key, value))
    return out, sums, *pivots
