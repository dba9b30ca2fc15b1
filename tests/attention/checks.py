"""Comparisons of an attention function with its plain counterpart, outputs and named gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention import reference

# Allowed difference, relative to the largest entry of the truth: a few roundings of the dtype that
# inputs and outputs have. (Sums are kept in float32 or better.)
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


def outputs_and_gradients(subject, inputs, cotangent, **options):
    """The output and the gradient of sum(output · cotangent) by input name, under jit."""

    @jax.jit
    def run(inputs, cotangent):
        output, pull_back = jax.vjp(lambda i: subject.call(i, **options), inputs)
        return output, pull_back(cotangent.astype(output.dtype))[0]

    return run(inputs, cotangent)


def assert_close(actual, expected, *, what: str, tolerance: float | None = None, scale=None):
    """Compares with an error that names `what`, relative to the largest expected entry."""
    tolerance = TOLERANCE[str(actual.dtype)] if tolerance is None else tolerance
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: not finite"
    scale = max(np.abs(expected).max(), 1e-3) if scale is None else scale
    error = np.abs(actual - expected).max() / scale
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def check_against_reference(
    subject, inputs, *, seed, mask=None, tolerance=None, reference_inputs=None, call=None, **options
):
    """Compares forward and every gradient with the plain form in float64.

    Args:
      subject: what to test.
      inputs: arrays by name.
      seed: of the cotangent.
      mask: [*batch, heads or 1, 1, keys] or None.
      tolerance: in place of the dtype's own.
      reference_inputs: the inputs for the plain form, if others (NaN removed).
      call: options for the function alone.
      **options: options for both.
    """
    with_mask = {} if mask is None else {"mask": np.asarray(mask)}
    clean = inputs if reference_inputs is None else reference_inputs
    expected = reference.output(subject.reference, clean, **with_mask, **options)
    cotangent = np.random.default_rng(seed + 1).standard_normal(expected.shape)
    cotangent = jnp.asarray(cotangent, jax.tree.leaves(inputs)[0].dtype)
    actual, gradients = outputs_and_gradients(
        subject, inputs, cotangent, mask=mask, **options, **(call or {})
    )
    assert_close(actual, expected, what="output", tolerance=tolerance)
    truth = reference.gradients(subject.reference, clean, cotangent, **with_mask, **options)
    # Each gradient is compared on its own scale, but for one that is zero in exact arithmetic (of
    # the keys where there is one key): float32 rounding of the largest, 8e-7 of it, is allowed.
    largest = max(np.abs(g).max() for g in truth.values())
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs[name].dtype, f"gradient of {name}: {gradient.dtype}"
        own = np.abs(truth[name]).max()
        scale = max(own, 0.02 * largest)
        assert_close(
            gradient,
            truth[name],
            what=f"gradient of {name}",
            tolerance=2 * TOLERANCE[str(gradient.dtype)] if tolerance is None else 2 * tolerance,
            scale=scale,
        )
