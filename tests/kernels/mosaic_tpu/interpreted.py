"""Running the TPU kernels on the CPU, and comparing them with float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels import interpreters

# Largest error, as a fraction of the largest number in the truth. bfloat16 inputs are exact; what
# is lost is the rounding of features and matrices (2^-9) on the way into the matrix unit.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


def interpreted():
    """Runs Pallas TPU kernels in the interpreter: memory starts as NaN, races are errors."""
    return interpreters.interpreted("mosaic_tpu")


def normal(seed: int, *shape: int, dtype="float32", mean: float = 0.0) -> jax.Array:
    """Normal numbers, rounded to `dtype`."""
    x = np.random.default_rng(seed).standard_normal(shape) + mean
    return jnp.asarray(x, jnp.float32).astype(dtype)


def random_mask(seed: int, batch: int, tokens: int, heads: int) -> jax.Array | None:
    """None for no heads; else bool [batch, tokens, heads], with all of the first row masked."""
    if not heads:
        return None
    mask = np.random.default_rng(seed).random((batch, tokens, heads)) < 0.7
    if batch > 1:
        mask[0] = False
    return jnp.asarray(mask)


def poison(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """NaN in the masked tokens of [batch, tokens, heads, dim]."""
    return x if mask is None else jnp.where(mask[..., None], x, jnp.nan)


def wide(*arrays: jax.Array) -> list[jax.Array]:
    """The same numbers in float64, under x64."""
    return [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in arrays]


def check(names: str, got, want, dtype: str) -> None:
    """Compares arrays by name."""
    for name, x, y in zip(names.split(), got, want, strict=True):
        assert x.shape == y.shape, name
        x, y = np.asarray(x.astype(jnp.float32)), np.asarray(y)
        limit = TOLERANCE[dtype] * max(np.abs(y).max(), 1e-3)
        error = np.abs(x - y).max()
        assert error <= limit, f"{name}: error {error:.2e} above {limit:.2e}"
