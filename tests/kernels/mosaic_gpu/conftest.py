"""Inputs and comparisons for the Mosaic GPU kernels, run by the interpreter that finds races."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import interpreters

# Half the distance between 1 and the next number: the rounding that every feature, matrix entry and
# output undergoes. Nothing else may add to it noticeably.
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture
def interpreter():
    """Kernels called in this context are interpreted; their memory starts as NaN."""
    with interpreters.interpreted("mosaic_gpu"):
        yield


@pytest.fixture
def draw():
    """`draw(seed)` makes arrays: keys and values with NaN where masked, and everything else."""
    return _Draw


class _Draw:
    def __init__(self, seed, dtype="bfloat16"):
        self.random = np.random.default_rng(seed)
        self.dtype = dtype

    def normal(self, *shape, mean=0.0, dtype=None):
        return jnp.asarray(self.random.standard_normal(shape) + mean, dtype or self.dtype)

    def keys_and_values(self, batch, tokens, heads, dim, value_dim, *, masked=None, mean=0.0):
        """`masked` is None, "shared" by the heads or "heads", where the first head has no token."""
        key = self.normal(batch, tokens, heads, dim, mean=mean)
        value = self.normal(batch, tokens, heads, value_dim, mean=mean)
        mask = None
        if masked:
            mask = self.random.random((batch, tokens, 1 if masked == "shared" else heads)) < 0.7
            if masked == "heads":
                mask[:, :, 0] = False
            key, value = (jnp.where(mask[..., None], x, jnp.nan) for x in (key, value))
            mask = jnp.asarray(mask)
        # The pivots are near the mean, but not at it.
        key_pivot = self.normal(batch, heads, dim, dtype="float32") / 10 + mean
        value_pivot = self.normal(batch, heads, value_dim, dtype="float32") / 10 + mean
        return SimpleNamespace(
            key=key, value=value, mask=mask, key_pivot=key_pivot, value_pivot=value_pivot
        )


@pytest.fixture
def in_float64():
    """`in_float64(function, *arrays)` is the truth: the same function of the same numbers."""

    def run(function, *arrays):
        with jax.enable_x64(True):
            wide = [
                x if x is None or x.dtype == bool else jnp.asarray(np.asarray(x, np.float64))
                for x in arrays
            ]
            return jax.tree.map(np.asarray, jax.jit(function)(*wide))

    return run


@pytest.fixture
def assert_close():
    """`assert_close(dtype, name=(got, expected), …)` names what differs.

    A rounding errs by 0.42 units in the root mean square, and up to four of them meet in a number
    (feature, matrix, cotangent, output): 0.84 units of the root mean square of the numbers; one is
    allowed. The largest error may be two units of the largest number.
    """

    def check(dtype, **pairs):
        unit = ROUNDOFF[dtype]
        for name, (got, expected) in pairs.items():
            got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
            assert got.shape == expected.shape, name
            assert np.all(np.isfinite(got)), f"{name} is not finite"
            error = np.abs(got - expected)
            assert error.max() <= 2 * unit * np.abs(expected).max(), f"{name}: {error.max()}"
            norm = np.linalg.norm(error.ravel()) / max(np.linalg.norm(expected.ravel()), 1e-30)
            assert norm <= unit, f"{name}: relative error {norm}"

    return check
