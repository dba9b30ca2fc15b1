"""What the TPU kernels say they can do, and that they lower for a TPU from any machine."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from cumulant_jax.kernels import PolynomialFeatures, elu1
from cumulant_jax.kernels.mosaic_tpu import inspection, unsupported
from cumulant_jax.kernels.mosaic_tpu.inspection import inspection_cases

CASES = inspection_cases()
# One of each kernel and dtype; the others differ in sizes alone.
FAST = {(c.name.split()[0], c.name.split()[2], c.name.split()[-1]): c.name for c in CASES}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=() if c.name in FAST.values() else pytest.mark.slow)
        for c in CASES
    ],
)
def test_lowers_for_tpu(case):
    exported = jax.export.export(jax.jit(case.function), platforms=["tpu"])(*case.arguments)
    assert exported.mlir_module().count("tpu_custom_call") == 1


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.bytes > 0 for case in inspection.inspection_cases())


BF16 = {"dtypes": ["bfloat16"], "heads": 12, "dim": 64}


@pytest.mark.parametrize(
    ("operation", "arguments", "word"),
    [
        ("moments", {**BF16, "dtypes": ["float64"]}, "float64"),
        ("moments", {**BF16, "features": PolynomialFeatures(1)}, "order=1"),
        ("causal", {**BF16, "features": PolynomialFeatures(3, all_pairs=True)}, "offdiagonal"),
        ("moments", {**BF16, "features": jnp.tanh}, "feature map"),
        ("moments", {**BF16, "dim": 300}, "300"),
        ("fused", {**BF16, "key_heads": 4, "tokens": 100}, "grouped"),
        ("fused", {**BF16, "tokens": 600}, "600"),
        ("causal", {**BF16, "heads": 64, "key_heads": 4}, "at most 16"),
        ("token_statistics", {**BF16, "heads": 200}, "200 heads"),
        ("causal_token_statistics", {**BF16, "dim": 256}, "2048"),
    ],
)
def test_reasons(operation, arguments, word):
    assert word in (unsupported(operation, **arguments) or "")


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("moments", {**BF16, "features": PolynomialFeatures(4)}),
        ("fused", {**BF16, "features": elu1, "tokens": 197}),
        ("causal", {**BF16, "features": PolynomialFeatures(3), "key_heads": 3}),
        ("token_statistics", BF16),
        ("causal_token_statistics", {**BF16, "dtypes": ["float32"]}),
    ],
)
def test_supported(operation, arguments):
    assert unsupported(operation, **arguments) is None
