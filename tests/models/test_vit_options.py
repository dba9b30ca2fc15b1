"""Wrong options are told in one line that names the option."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from cumulant_jax.models import ViTOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_size": 30, "patch_size": 16},
            r"image_size \(30, 30\) must be a multiple of patch_size",
        ),
        ({"image_size": (32, 24)}, "image_size"),
        ({"image_size": (32, 32, 3)}, r"image_size must be one number or \(height, width\)"),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"dim": 100, "heads": 3}, "dim must be a multiple of heads, got dim=100 and heads=3"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"num_classes": -1}, "num_classes must be at least 0"),
        ({"pool": "avg"}, "unknown pool 'avg'"),
        ({"pool": "tokens"}, "did you mean 'token'"),
        ({"position": "learnt"}, "unknown position 'learnt'; did you mean 'learned'"),
        ({"position": "sincos2d", "dim": 6, "heads": 2}, "dim must be a multiple of 4"),
        ({"qk_norm": "layr"}, "unknown qk_norm 'layr'; did you mean 'layer'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"drop_path": -0.1}, "drop_path must be at least 0"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"class_token": False}, "pool must be 'mean' when class_token is False"),
        ({"attention": ["softmax", "tssa"]}, "attention has 2 entries and the model has depth 12"),
        ({"attention": ("softmax",) * 11 + ("tsa",)}, "did you mean 'tssa'"),
        ({"attention_options": [{}]}, "attention_options has 1 entries"),
        ({"attention": "tssa", "qk_norm": "rms"}, "qk_norm must be None with attention='tssa'"),
        ({"attention": "xca", "query_scale": 1.0}, "query_scale must be None"),
        ({"dtype": "int8"}, "dtype must be a floating dtype"),
        ({"param_dtype": "flot32"}, "param_dtype must be a floating dtype"),
    ],
    ids=str,
)
def test_impossible_values(options, message):
    with pytest.raises(ValueError, match=message):
        ViTOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 2.0}, "depth must be an integer, got 2.0"),
        ({"dim": True}, "dim must be an integer"),
        ({"dropout": "0.1"}, "dropout must be a number"),
        ({"attention": 3}, "attention must be a name, a function"),
        ({"attention": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, "without parameters of its own"),
        ({"attention_options": {"scale": jnp.ones(3)}}, "attention option scale is a"),
        (
            {"attention": "cumulant3", "attention_options": {"reductoin": "sum"}},
            "unknown attention option of cumulant3 'reductoin'; did you mean 'reduction'",
        ),
        ({"attention": "cumulant3", "attention_options": {"order": 2}}, "of cumulant3 'order'"),
        ({"attention": "tssa", "attention_options": {"reduction": "sum"}}, "of tssa 'reduction'"),
        ({"attention": "tssa", "attention_options": {"temperature": 1.0}}, "of tssa 'temperature'"),
    ],
    ids=[
        "depth",
        "dim",
        "dropout",
        "attention",
        "module",
        "array",
        "typo",
        "fixed",
        "tssa",
        "learned",
    ],
)
def test_values_of_the_wrong_kind(options, message):
    with pytest.raises(TypeError, match=message):
        ViTOptions(**options)


def test_a_hybrid_may_normalise_where_there_are_queries():
    options = ViTOptions(depth=2, attention=["tssa", "softmax"], qk_norm="rms")
    assert options.attention_per_block == ("tssa", "softmax")


def test_options_for_each_block():
    options = ViTOptions(
        depth=2, attention=["cumulant3", "tssa"], attention_options=[{"reduction": "sum"}, None]
    )
    assert options.attention_options_per_block == ({"reduction": "sum"}, {})


def test_a_callable_with_open_options_takes_any():
    def attention(query, key, value, **options):
        return value

    assert ViTOptions(attention=attention, attention_options={"anything": 1}).attention is attention
    assert ViTOptions(attention=jax.nn.dot_product_attention, attention_options={"scale": 0.5})


def test_options_are_a_value():
    """Equal options are equal and hash alike, so that equal models share their compilations."""
    first, second = (ViTOptions(attention_options={"scale": 0.5}) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != ViTOptions()
