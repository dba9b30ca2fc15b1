"""Tuned block sizes: where they come from and how they are checked."""

import importlib
import json

import jax
import pytest

import cumulant_jax as cj
from cumulant_jax.kernels import assume_device, block_sizes
from cumulant_jax.kernels.block_sizes import ENVIRONMENT_VARIABLE, TABLE, try_sizes, tuned
from cumulant_jax.kernels.device import H100, TPU_V5E
from cumulant_jax.kernels.implementation import IMPLEMENTATIONS
from cumulant_jax.kernels.token_pass import chunk_length


@pytest.fixture(autouse=True)
def _no_table_of_ones_own(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_the_table_that_is_shipped():
    table = block_sizes.read_table(TABLE)
    assert set(table) == set(IMPLEMENTATIONS)


def test_a_table_of_ones_own_goes_first(monkeypatch, tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps({"xla": {"cpu": {"chunk_bytes": 4096}}}))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    assert tuned("xla", "cpu") == {"chunk_bytes": 4096}
    assert tuned("mosaic_gpu", "cpu") == {}
    with try_sizes("xla", {"chunk_bytes": 8}):
        assert tuned("xla", "cpu") == {"chunk_bytes": 8}
    assert tuned("xla", "cpu") == {"chunk_bytes": 4096}


def test_sizes_reach_the_passes():
    short, long = 1 << 20, 1 << 22
    with try_sizes("xla", {"chunk_bytes": short}):
        few = chunk_length(65536, 4096)
    with try_sizes("xla", {"chunk_bytes": long}):
        many = chunk_length(65536, 4096)
    assert (few, many) == (256, 1024)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"xla": 3}', '{"xla": {"cpu": {"chunk_bytes": -1}}}']
)
def test_a_damaged_table_is_named(monkeypatch, tmp_path, content):
    path = tmp_path / "damaged.json"
    path.write_text(content)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"damaged.json is no table of block sizes"):
        tuned("xla", "cpu")


def test_a_missing_table_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(FileNotFoundError, match=r"absent.json.*--tune"):
        tuned("xla", "cpu")


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_sizes_to_try_are_sizes_that_the_kernels_know(implementation):
    """Each candidate changes the program that is lowered, or at least lowers."""
    platform, device, dtype = {
        "mosaic_gpu": ("cuda", H100, "bfloat16"),
        "mosaic_tpu": ("tpu", TPU_V5E, "bfloat16"),
    }[implementation]
    module = importlib.import_module(f"cumulant_jax.kernels.{implementation}.passes")
    x = jax.ShapeDtypeStruct((1, 8192, 2, 64), dtype)

    def lower(sizes):
        def run(q, k, v):
            return cj.cumulant_attention(q, k, v, implementation=implementation)

        with assume_device(device), try_sizes(implementation, sizes):
            return jax.export.export(jax.jit(run), platforms=[platform])(x, x, x).mlir_module()

    first = {name: values[0] for name, values in module.CANDIDATES.items()}
    last = {name: values[-1] for name, values in module.CANDIDATES.items()}
    assert lower(first) != lower(last)
