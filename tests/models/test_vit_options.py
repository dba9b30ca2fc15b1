"""Wrong options are told in one line that names the option."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from cumulant_jax.models import ViTOptions


class Unhashable:
    """A callable that cannot be part of a model's structure."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, query, key, value):
        return value


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
        ({"dtype": None}, "dtype must be a floating dtype such as .* got None"),
    ],
    ids=str,
)
def test_impossible_values(options, message):
    with pytest.raises(ValueError, match=message):
        ViTOptions(**options)


def test_remat_is_a_flag_or_a_policy():
    assert [ViTOptions(remat=value).remat for value in (True, "dots")] == [True, "dots"]
    with pytest.raises(ValueError, match="unknown remat 'dot'; did you mean 'dots'"):
        ViTOptions(remat="dot")


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
            "unknown option of cumulant3 attention 'reductoin'; did you mean 'reduction'",
        ),
        (
            {"attention": "cumulant3", "attention_options": {"order": 2}},
            "cumulant3 attention 'order'",
        ),
        (
            {"attention": "tssa", "attention_options": {"reduction": "sum"}},
            "of tssa attention 'reduction'",
        ),
        (
            {"attention": "tssa", "attention_options": {"temperature": 1.0}},
            "of tssa attention 'temper",
        ),
        ({"class_token": "no"}, "class_token must be True or False, got 'no'"),
        ({"fc_norm": 0}, "fc_norm must be True or False, got 0"),
        ({"remat": 1}, "remat must be True or False, got 1"),
        ({"remat": None}, "remat must be True or False, got None"),
        ({"qkv_bias": "no"}, "qkv_bias must be True or False, got 'no'"),
        (
            {"position": ["learned"]},
            r"position must be one of fourier, learned, .*got \['learned'\]",
        ),
        ({"pool": ("token",)}, "pool must be one of mean, token, got"),
        ({"qk_norm": ["layer"]}, r"qk_norm must be one of layer, rms, got \['layer'\]"),
        ({"attention": [["softmax"]] * 12}, r"attention must be a name.*got \['softmax'\]"),
        ({"attention": Unhashable()}, "attention must be a name, a function"),
        ({"attention_options": 3}, "attention_options must be a mapping .*got 3"),
        ({"attention_options": False}, "attention_options must be a mapping .*got False"),
        ({"attention_options": [3] * 12}, "attention_options must be a mapping .*got 3"),
        ({"attention_options": {1: 2}}, "attention_options must be a mapping .*got {1: 2}"),
        ({"attention_options": {"scale": (1, [2])}}, "attention option scale is a tuple"),
        ({"image_size": "32"}, "image_size must be an integer, got '32'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
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


def test_a_callable_with_named_options_takes_no_other():
    def attention(query, key, value, *, factor=1.0):
        return value * factor

    assert ViTOptions(attention=attention, attention_options={"factor": 2.0})
    with pytest.raises(TypeError, match="unknown option of attention attention 'facter'; did you"):
        ViTOptions(attention=attention, attention_options={"facter": 2.0})


def test_options_are_a_value():
    """Equal options are equal and hash alike, so that equal models share their compilations."""
    first, second = (ViTOptions(attention_options={"scale": 0.5}) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != ViTOptions()
