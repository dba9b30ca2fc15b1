"""What the tests of the models share: reference files and small models."""

import contextlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.random_models import random_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SMALL = {"image_size": 8, "channels": 2, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2}


def read_safetensors(path):
    """A safetensors file as a dict of arrays: 8 bytes of header length, a JSON header, raw data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32"
            begin, end = (start + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(raw[begin:end], "<f4").reshape(entry["shape"])
    return arrays


def set_parameters(module, values):
    """Sets every parameter of a module from a dict keyed by dotted path; none may be missing."""
    parameters = {
        ".".join(map(str, path)): parameter
        for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    assert sorted(values) == sorted(parameters)
    for name, value in values.items():
        assert parameters[name].shape == value.shape, name
        parameters[name][...] = jnp.asarray(value, parameters[name].dtype)
    flat = [(tuple(map(_key, name.split("."))), parameters[name]) for name in parameters]
    nnx.update(module, nnx.from_flat_state(flat))


def _key(text):
    return int(text) if text.isdigit() else text


_TIMM_NAMES = [
    ("patch_embed.proj.", "patch_embedding."),
    ("cls_token", "class_token"),
    ("pos_embed", "positions.position_embedding"),
    ("fc_norm.", "norm."),
    (".attn.proj.", ".attention.out."),
    (".attn.", ".attention."),
    (".mlp.fc1.", ".mlp.expand."),
    (".mlp.fc2.", ".mlp.contract."),
    (".ls1.", ".layer_scale1."),
    (".ls2.", ".layer_scale2."),
]


def from_timm(weights):
    """Names and layouts of timm's VisionTransformer as ours."""
    ours = {}
    for name, value in weights.items():
        is_norm = "norm" in name
        for theirs, new in _TIMM_NAMES:
            name = name.replace(theirs, new)
        if name.endswith(".weight"):
            name = name.removesuffix("weight") + ("scale" if is_norm else "kernel")
            value = {1: lambda v: v, 2: np.transpose, 4: lambda v: v.transpose(2, 3, 1, 0)}[
                value.ndim
            ](value)
        ours[name] = value
    return ours


@pytest.fixture(autouse=True)
def fast_compilation():
    """These programs run once: nearly all of their time is compilation."""
    with jax_setting("jax_disable_most_optimizations", True):
        yield


@contextlib.contextmanager
def jax_setting(name, value):
    before = jax.config.read(name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


@pytest.fixture
def golden():
    """The folder of reference arrays."""
    return GOLDEN


@pytest.fixture
def load_timm():
    """A function from a reference model's name to its weights under our names and its arrays."""

    def load(name):
        folder = GOLDEN / "interop"
        with np.load(folder / f"{name}.npz") as arrays:
            return from_timm(read_safetensors(folder / f"{name}.safetensors")), dict(arrays)

    return load


@pytest.fixture
def set_params():
    """A function that sets every parameter of a module from a dict keyed by dotted path."""
    return set_parameters


@pytest.fixture
def small():
    """A function that makes a small image model by `random_model`; options override its own."""

    def create(*, name="vit_nano2", seed=0, **options):
        return random_model(name, seed=seed, **{**SMALL, **options})

    return create


@pytest.fixture
def images():
    """A function from a seed and a batch size to images [batch, 8, 8, 2] for the small models."""

    def draw(seed=0, batch=3, size=(8, 8)):
        return jax.random.normal(jax.random.key(seed), (batch, *size, 2))

    return draw
