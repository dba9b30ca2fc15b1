"""Every kernel lowers for a GPU on a machine that has none; what they support is said plainly."""

import re

import jax
import jax.numpy as jnp
import pytest

from cumulant_jax.kernels import PolynomialFeatures, elu1
from cumulant_jax.kernels.mosaic_gpu import unsupported
from cumulant_jax.kernels.mosaic_gpu.inspection import inspection_cases

CASES = {case.name: case for case in inspection_cases()}
FAST = [
    "sum_moments order 3 8x4096x12x64/64 bfloat16 masked",
    "sum_moments_backward order 3 64x197x12x64/64 bfloat16",
    "read_out order 3 64x197x12x64/64 bfloat16",
    "read_out_backward order 3 8x4096x12x64/64 bfloat16",
    "read_out_backward elu1 8x1025x16x128/128 bfloat16",
    "fused order 3 256x197x12x64/64 bfloat16 masked",
]
ABLE = {
    "features": PolynomialFeatures(3),
    "dtypes": ("bfloat16",) * 3,
    "dim": 64,
    "value_dim": 64,
    "lengths": (197, 197),
    "compute_capability": "9.0",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES]
)
def test_kernels_lower_for_a_gpu(name):
    case = CASES[name]
    exported = jax.export.export(jax.jit(case.function), platforms=["cuda"])(*case.arguments)
    assert "mosaic_gpu" in exported.mlir_module()
    outputs = jax.tree.leaves(jax.eval_shape(case.function, *case.arguments))
    assert [x.shape for x in exported.out_avals] == [x.shape for x in outputs]


def test_a_listed_name_is_a_case():
    assert set(FAST) <= set(CASES)


@pytest.mark.parametrize(
    ("operation", "change", "reason"),
    [
        ("sum_moments", {}, None),
        ("sum_moments", {"dim": 256, "value_dim": 250}, None),
        ("fused_cumulant", {}, None),
        ("fused_linear", {"features": elu1}, None),
        ("fused_linear", {}, "does not go with"),
        ("fused_cumulant", {"lengths": (197, 513)}, "up to 512 tokens, not 513"),
        ("fused_cumulant", {"groups": 2}, "groups of 2"),
        ("fused_cumulant", {"dim": 72}, "up to 64 .* not 72 and 64"),
        ("read_out_backward", {"value_dim": 136}, "up to 128 .* not 64 and 136"),
        ("read_out", {"features": PolynomialFeatures(4), "dim": 80}, "up to 64"),
        ("read_out", {"features": elu1, "dim": 192}, "up to 128"),
        ("read_out", {"features": PolynomialFeatures(3, all_pairs=True)}, "without pairs"),
        ("read_out", {"features": jnp.tanh}, "elu1, relu or exp"),
        ("read_out", {"dtypes": ("float32",) * 3}, "not float32"),
        ("read_out", {"dtypes": ("bfloat16", "float16")}, "not bfloat16, float16"),
        ("read_out", {"lengths": (0,)}, "at least one token"),
        ("read_out", {"compute_capability": "8.0"}, "neither TMA nor wgmma"),
        ("read_out", {"compute_capability": "10.0"}, "tcgen05"),
        ("scan", {}, "no kernel for scan"),
    ],
)
def test_unsupported_gives_the_reason(operation, change, reason):
    got = unsupported(operation, **(ABLE | change))
    if reason is None:
        assert got is None
    else:
        assert got is not None
        assert re.search(reason, got), got
