"""What is found in programs traced for chips that are not there; nothing is compiled."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from cumulant_jax.costs.chips import CHIPS
from experiments import compile_kernels, compiler_targets
from experiments.compile_kernels import _kernels_of, _moved_bytes

V5E = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
H100 = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0"
)


def case(**changes):
    sizes = {"batch": 1, "tokens": 1024, "heads": 2, "dim": 64, "dtype": "bfloat16"}
    return {"kind": "cumulant3", "is_causal": False, **sizes, **changes}


@pytest.mark.parametrize("target", [V5E, H100])
def test_a_training_step_has_four_passes(target):
    records = [record for record, _ in _kernels_of(case(), target)]
    found = {record["kernel"]: record["program"] for record in records}
    assert found == {
        "sum_moments": "forward",
        "read_out": "forward",
        "read_out_backward": "training",
        "sum_moments_backward": "training",
    }
    tokens = 1024 * 2 * 64 * 2
    for record in records:
        assert record["array_bytes"] >= 2 * tokens


def test_a_causal_forward_pass_saves_states_for_training():
    records = [r for r, _ in _kernels_of(case(is_causal=True, tokens=4096), V5E)]
    plain, saving = (r for r in records if r["kernel"] == "causal_attention")
    assert (plain["program"], saving["program"]) == ("forward", "training")
    assert saving["array_bytes"] > plain["array_bytes"]


def test_what_xla_serves_says_why():
    [forward, training] = [r for r, _ in _kernels_of(case(dtype="float32"), H100)]
    assert "implementation xla" in forward["reason"]
    assert "float32" in forward["reason"]
    assert (forward["program"], training["program"]) == ("forward", "training")


def test_a_block_is_moved_when_its_index_changes():
    def kernel(x_ref, row_ref, out_ref):
        out_ref[...] = x_ref[...] + row_ref[...]

    def add(x, row):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((100, 128), jnp.float32),
            grid=(2, 4),
            in_specs=[
                pl.BlockSpec((32, 128), lambda i, j: (j, 0)),  # all four blocks, twice
                pl.BlockSpec((1, 128), lambda i, j: (i, 0)),  # two rows
            ],
            out_specs=pl.BlockSpec((32, 128), lambda i, j: (j, 0)),
        )(x, row)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((100, 128), (2, 128))]
    [equation] = compile_kernels._kernel_equations(jax.make_jaxpr(add)(*shapes).jaxpr)
    # The last block of 32 rows has 4.
    expected = 4 * 128 * (2 * 100 + 2 + 2 * 100)
    assert _moved_bytes(equation.params["grid_mapping"], [2, 4]) == expected


def test_loops_are_seen():
    def looping(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: y * x, x)

    assert compile_kernels._has_loop(jax.make_jaxpr(jax.jit(looping))(1.0).jaxpr)
    assert not compile_kernels._has_loop(jax.make_jaxpr(jax.jit(lambda x: x * x))(1.0).jaxpr)


def test_the_target_config_is_that_of_the_chip():
    text = compiler_targets.CONFIG.read_text(encoding="utf-8")
    pairs = (line.partition(": ") for line in text.splitlines() if not line.startswith("#"))
    fields = {name.strip(): value for name, _, value in pairs}
    chip = CHIPS["h100"]
    assert int(fields["core_count"]) == chip.cores
    assert int(fields["shared_memory_per_core"]) == chip.shared_bytes
    assert int(fields["registers_per_core_limit"]) == chip.registers
    assert int(fields["threads_per_core_limit"]) == chip.threads
    assert int(fields["memory_bandwidth"]) == pytest.approx(chip.bandwidth, rel=0.01)
