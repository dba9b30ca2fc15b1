"""Every layout of a training step gives the losses of one device."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.training import layouts

MESHES = (
    "data=8",
    "fsdp=8",
    "data=2,fsdp=2,sequence=2",
    "tensor=2,sequence=4",
    "fsdp=2,tensor=2,sequence=2",
)
FAST = {("vit", "cumulant3"): MESHES[1:4:2], ("tost", "tssa"): MESHES[-1:]}
SUBJECTS = [
    pytest.param(model, kind, meshes, marks=marks, id=f"{model}-{kind}-{len(meshes)}-meshes")
    for model in ("vit", "tost")
    for kind in ("softmax", "cumulant3", "tssa")
    for meshes, marks in (
        (FAST.get((model, kind), ()), ()),
        (MESHES, pytest.mark.slow),
    )
    if meshes
]


def run(what, model, kind, meshes):
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-m", layouts.__name__, what, model, kind, *meshes],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("model", "kind", "meshes"), SUBJECTS)
def test_losses_are_those_of_one_device(model, kind, meshes):
    found = run("losses", model, kind, ["data=1", *meshes])
    for mesh in meshes:
        # Rounding of float32, through four steps of the optimizer.
        np.testing.assert_allclose(
            found[mesh]["losses"], found["data=1"]["losses"], rtol=2e-5, err_msg=mesh
        )
        kernels = [k for k in found[mesh]["layouts"] if k.endswith("kernel")]
        # Parameters, both moments of the optimizer, and the moving average.
        assert len(kernels) % 4 == 0
        if "fsdp" in mesh:
            whole = {k for k in kernels if "fsdp" not in found[mesh]["layouts"][k]}
            # The digits have 10 classes, which 8 devices cannot split evenly.
            assert {k.partition("/")[2][-11:] for k in whole} <= {"head/kernel"}, mesh
            assert mesh == "fsdp=8" or not whole


def test_what_is_sent():
    """Parameters are gathered one by one; bytes of split sequences do not grow with the tokens."""
    sizes = {}
    for tokens in (16, 64):
        found = run("program", f"vit of {tokens} tokens", "cumulant3", ["sequence=8"])["sequence=8"]
        assert {kind for kind, _, _ in found["collectives"]} == {"all-reduce"}
        sizes[tokens] = sum(size for _, size, _ in found["collectives"])
    # Patches of 2x2 pixels have a kernel [4, 32], pixels one of [1, 32]: its gradient is summed.
    assert sizes[16] - sizes[64] == (4 - 1) * 32 * 4
    found = run("program", "vit", "cumulant3", ["fsdp=8"])["fsdp=8"]
    gathered = [size for kind, size, _ in found["collectives"] if kind == "all-gather"]
    kernels = [4 * 32, *2 * [32 * 96, 32 * 32, 32 * 128, 128 * 32], 16 * 32]
    assert sorted(gathered) == sorted(4 * size for size in kernels)
    assert {kind for kind, _, _ in found["collectives"]} == {"all-gather", "all-reduce"}
