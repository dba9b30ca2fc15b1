"""Which implementation serves a call, and what is said about it."""

import logging

import pytest

from cumulant_jax.kernels import assume_device
from cumulant_jax.kernels import implementation as dispatch
from cumulant_jax.kernels.device import H100, TPU_V5E, Device, current_device

CPU = Device("cpu", "cpu")
KERNELS = {"mosaic_gpu": lambda device: None, "mosaic_tpu": lambda device: None}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    dispatch._log.cache_clear()


@pytest.mark.parametrize(
    ("device", "expected"), [(CPU, "xla"), (H100, "mosaic_gpu"), (TPU_V5E, "mosaic_tpu")]
)
def test_none_is_the_best_of_the_device(device, expected):
    with assume_device(device):
        assert dispatch.choose_implementation(None, "some_attention", KERNELS) == expected
        assert dispatch.choose_implementation(None, "other_attention", {}) == "xla"
        assert dispatch.choose_implementation("xla", "some_attention", KERNELS) == "xla"


def test_none_is_xla_where_the_kernel_cannot():
    kernels = {"mosaic_gpu": lambda d: f"needs more than {d.compute_capability}"}
    with assume_device(Device("gpu", "Tesla T4", (7, 5))):
        assert dispatch.choose_implementation(None, "some_attention", kernels) == "xla"
        with pytest.raises(NotImplementedError, match=r"mosaic_gpu' needs more than \(7, 5\)"):
            dispatch.choose_implementation("mosaic_gpu", "some_attention", kernels)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [
        (CPU, "mosaic_gpu", "runs on a gpu, and this is a cpu"),
        (H100, "mosaic_tpu", "runs on a tpu, and this is a gpu"),
    ],
)
def test_a_named_implementation_needs_its_device(device, name, message):
    with assume_device(device), pytest.raises(NotImplementedError, match=message):
        dispatch.choose_implementation(name, "some_attention", KERNELS)


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown implementation 'mosaic_tpus'; did you mean"):
        dispatch.choose_implementation("mosaic_tpus", "some_attention", KERNELS)
    with pytest.raises(NotImplementedError, match="does not have this operation"):
        dispatch.choose_implementation("mosaic_gpu", "some_attention", {})


def test_the_environment_variable_stands_in_for_none(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "xla")
    with assume_device(H100):
        assert dispatch.choose_implementation(None, "some_attention", KERNELS) == "xla"
        argument = dispatch.choose_implementation("mosaic_gpu", "some_attention", KERNELS)
        assert argument == "mosaic_gpu"
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f"unknown {dispatch.ENVIRONMENT_VARIABLE} 'cuda'"):
        dispatch.choose_implementation(None, "some_attention", KERNELS)


def test_one_log_line_per_choice(caplog):
    caplog.set_level(logging.INFO, logger="cumulant_jax")
    for _ in range(3):
        for name in (None, "xla"):
            with assume_device(H100):
                dispatch.choose_implementation(name, "some_attention", KERNELS)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"some_attention: implementation mosaic_gpu on {H100.kind} (the best here)",
        f"some_attention: implementation xla on {H100.kind} (as asked)",
    ]


def test_the_assumed_device_ends_with_its_block():
    before = current_device()
    with assume_device(H100):
        assert current_device() is H100
    assert current_device() == before
