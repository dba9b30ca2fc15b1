"""The TPU kernels as one of the implementations that attention chooses from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cumulant_jax.kernels.device import Device, current_device
from cumulant_jax.kernels.mosaic_tpu import support
from cumulant_jax.kernels.mosaic_tpu.causal import (
    causal_cumulant,
    causal_cumulant_backward,
    causal_linear,
    causal_linear_backward,
)
from cumulant_jax.kernels.mosaic_tpu.causal_token_statistics import (
    causal_token_statistics as run_causal_statistics,
)
from cumulant_jax.kernels.mosaic_tpu.causal_token_statistics import (
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
from cumulant_jax.kernels.mosaic_tpu.tiling import BlockSizes, block_sizes
from cumulant_jax.kernels.mosaic_tpu.token_statistics import token_statistics as run_statistics
from cumulant_jax.kernels.mosaic_tpu.token_statistics import token_statistics_backward
from cumulant_jax.kernels.passes import Facts, Passes
from cumulant_jax.kernels.reading import CumulantReading, Reading
from cumulant_jax.kernels.token_statistics import StatisticsFacts

OLD_CHIPS = ("v2", "v3")

#: What `experiments.benchmark --tune` tries.
CANDIDATES = {
    "tokens": (256, 512, 1024),
    "lanes": (256, 512, 1024),
    "causal_tokens": (512, 1024, 2048),
    "causal_lanes": (128, 256, 512),
    "chunk": (64, 128, 256),
}


def unsupported(facts: Facts, device: Device) -> str | None:
    """Why the TPU kernels cannot serve a call, None where they can."""
    if len(set(facts.dtypes)) > 1:
        names = ", ".join(map(str, facts.dtypes))
        return f"needs query, key and value of one dtype, not {names}"
    if facts.is_causal and facts.queries == 1:
        return "has nothing to gain in a step of one token"
    operation = "causal" if facts.is_causal else "moments"
    return _wrong_call(facts, device) or _reason(operation, facts)


def unsupported_statistics(facts: StatisticsFacts, device: Device) -> str | None:
    """Why the TPU kernels cannot serve token statistics, None where they can."""
    if facts.bias_per_row:
        return "takes one denominator_bias for all examples"
    reason = support.unsupported(
        "token_statistics", dtypes=[facts.dtype], heads=facts.heads, dim=facts.dim
    )
    return _wrong_call(facts, device) or (reason and f"does not take {reason}")


def _wrong_call(facts: Facts | StatisticsFacts, device: Device) -> str | None:
    if any(old in device.kind for old in OLD_CHIPS):
        return f"needs a TPU v4 or later, and this is a {device.kind}"
    if facts.is_symbolic:
        return "needs sizes that are known, and some are symbolic or zero"
    return None


def _reason(operation: str, facts: Facts) -> str | None:
    reason = support.unsupported(
        operation,
        dtypes=facts.dtypes,
        heads=facts.heads,
        dim=facts.dim,
        value_dim=facts.value_dim,
        key_heads=facts.key_heads,
        tokens=max(facts.queries, facts.keys),
        features=facts.reading.features,
    )
    return reason and f"does not take {reason}"


def passes() -> Passes:
    """The passes."""
    return Passes(
        _sized(sum_moments),
        _sized(sum_moments_backward),
        _sized(read_out),
        _sized(read_out_backward),
        _causal,
        _fits,
        _fused,
        _fused_backward,
    )


def _sizes() -> BlockSizes:
    return block_sizes(current_device().kind)


def _sized(function):
    def run(*arrays, **options):
        return function(*arrays, **options, block_sizes=_sizes())

    return run


def _fits(facts: Facts) -> bool:
    """Whether all tokens of a head fit in VMEM."""
    return _reason("fused", facts) is None


def _fused(reading: Reading, query, key, value, mask, scale, *, keep: bool):
    del keep  # the backward pass makes the moments anew
    arrays = (reading.features, query, key, value, mask)
    if isinstance(reading, CumulantReading):
        options = {"reduction_is_sum": reading.reduction_is_sum, "block_sizes": _sizes()}
        return (fused_cumulant(*arrays, scale, **options),)
    eps = reading.normalizer_eps
    return (fused_linear(*arrays, normalizer_eps=eps, block_sizes=_sizes()),)


def _fused_backward(reading: Reading, query, key, value, mask, scale, out_bar):
    arrays = (reading.features, query, key, value, mask)
    if isinstance(reading, CumulantReading):
        options = {"reduction_is_sum": reading.reduction_is_sum, "block_sizes": _sizes()}
        return fused_cumulant_backward(*arrays, scale, out_bar, **options)
    eps = reading.normalizer_eps
    bars = fused_linear_backward(*arrays, out_bar, normalizer_eps=eps, block_sizes=_sizes())
    return *bars, jnp.zeros_like(scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal(reading: Reading, query, key, value, mask, scale, sums, key_pivot, value_pivot):
    arrays = (query, key, value, mask, scale, sums, key_pivot, value_pivot)
    return _run_causal(reading, arrays, save_states=False)[:2]


def _causal_forward(reading, *arrays):
    out, sums, states = _run_causal(reading, arrays, save_states=True)
    return (out, sums), (arrays, states)


def _causal_backward(reading, residuals, cotangents):
    (query, key, value, mask, scale, sums, key_pivot, value_pivot), states = residuals
    arrays = (reading.features, query, key, value, mask, sums)
    if isinstance(reading, CumulantReading):
        options = {"reduction_is_sum": reading.reduction_is_sum, "block_sizes": _sizes()}
        *bars, sums_bar, scale_bar = causal_cumulant_backward(
            *arrays, key_pivot, value_pivot, scale, states, *cotangents, **options
        )
    else:
        eps = reading.normalizer_eps
        options = {"normalizer_eps": eps, "block_sizes": _sizes()}
        *bars, sums_bar = causal_linear_backward(*arrays, states, *cotangents, **options)
        scale_bar = jnp.zeros_like(scale)
    pivots = jnp.zeros_like(key_pivot), jnp.zeros_like(value_pivot)
    return *bars, None, scale_bar, sums_bar, *pivots


_causal.defvjp(_causal_forward, _causal_backward)


def _run_causal(reading: Reading, arrays, *, save_states: bool):
    query, key, value, mask, scale, sums, key_pivot, value_pivot = arrays
    arrays = (reading.features, query, key, value, mask, sums)
    if isinstance(reading, CumulantReading):
        options = {"reduction_is_sum": reading.reduction_is_sum, "block_sizes": _sizes()}
        options["save_states"] = save_states
        return causal_cumulant(*arrays, key_pivot, value_pivot, scale, **options)
    options = {"normalizer_eps": reading.normalizer_eps, "block_sizes": _sizes()}
    return causal_linear(*arrays, save_states=save_states, **options)


@jax.custom_vjp
def token_statistics(w: jax.Array, temperature: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Token statistics attention, see `token_statistics.attend`."""
    return run_statistics(w, temperature, mask, block_sizes=_sizes())[0]


def _statistics_forward(w, temperature, mask):
    out, sums = run_statistics(w, temperature, mask, block_sizes=_sizes())
    return out, (w, temperature, mask, sums)


def _statistics_backward(residuals, out_bar):
    w, temperature, mask, sums = residuals
    bars = token_statistics_backward(w, temperature, mask, sums, out_bar, block_sizes=_sizes())
    return *bars, None


token_statistics.defvjp(_statistics_forward, _statistics_backward)


@jax.custom_vjp
def causal_token_statistics(w, temperature, mask, bias, state) -> tuple[jax.Array, ...]:
    """Causal token statistics attention and its last state, see `token_statistics`."""
    out, after, _ = run_causal_statistics(w, temperature, mask, bias, state, block_sizes=_sizes())
    return out, *after


def _causal_statistics_forward(w, temperature, mask, bias, state):
    out, after, saved = run_causal_statistics(
        *(w, temperature, mask, bias, state), save_states=True, block_sizes=_sizes()
    )
    return (out, *after), (w, temperature, mask, bias, saved)


def _causal_statistics_backward(residuals, cotangents):
    w, temperature, mask, bias, saved = residuals
    out_bar, *state_bar = cotangents
    w_bar, temperature_bar, bias_bar, before_bar = causal_token_statistics_backward(
        w, temperature, mask, bias, saved, out_bar, tuple(state_bar), block_sizes=_sizes()
    )
    return w_bar, temperature_bar, None, bias_bar, before_bar


causal_token_statistics.defvjp(_causal_statistics_forward, _causal_statistics_backward)
