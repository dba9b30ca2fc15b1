"""Names, what they resolve to, and parameter counts."""

import json
import re

import jax.numpy as jnp
import pytest
from flax import nnx

from cumulant_jax import models

# timm's and torchvision's published counts: 1000 classes, class token, learned positions, 224
# pixels.
PUBLISHED = {
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "vit_s32": 22_878_952,
    "vit_b32": 88_224_232,
    "vit_l32": 306_535_400,
    "vit_b8": 86_576_872,
}
# Published to 0.01 million only.
PUBLISHED_MILLIONS = {"vit_l14": 304.20}


def count(name, **options):
    return models.count_parameters(
        nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0), **options))
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert count(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_published_parameter_counts_in_millions(name):
    assert round(count(name) / 1e6, 2) == PUBLISHED_MILLIONS[name]


@pytest.mark.parametrize(
    "name", ["vit_nano2", "vit_ti4", "vit_ti8", "vit_s14", "vit_b14", "vit_s8"]
)
def test_counts_in_closed_form(name):
    """What the parts of a ViT hold, added up by hand."""
    shape = models.options(name)
    dim, depth, patch = shape["dim"], shape["depth"], shape["patch_size"][0]
    patch_embedding = patch * patch * 3 * dim + dim
    positions = ((224 // patch) ** 2 + 1) * dim
    attention = 4 * dim * dim + 4 * dim
    mlp = 8 * dim * dim + 5 * dim
    block = attention + mlp + 2 * 2 * dim
    head = dim * 1000 + 1000
    assert count(name) == patch_embedding + dim + positions + depth * block + 2 * dim + head


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"num_classes": 0}, -(192 * 1000 + 1000)),
        ({"num_classes": 10}, -(192 + 1) * 990),
        ({"pool": "mean"}, -2 * 192),
        ({"pool": "mean", "class_token": True}, 0),
        ({"position": "none"}, -197 * 192),
        ({"position": "sincos2d"}, -197 * 192),
        ({"qkv_bias": False}, -12 * 3 * 192),
        ({"qk_norm": "layer"}, 12 * 4 * 64),
        ({"qk_norm": "rms"}, 12 * 2 * 64),
        ({"query_scale": 1.0}, 12 * 3),
        ({"layer_scale": 0.1}, 12 * 2 * 192),
        ({"attention": "cumulant3"}, 0),
        ({"attention": "tssa"}, 12 * (3 - 2 * (192 * 192 + 192))),
        ({"attention": "xca"}, 12 * 3),
        ({"attention": "mssa"}, -12 * 2 * (192 * 192 + 192)),
        ({"attention": ["tssa"] * 2 + ["softmax"] * 10}, 2 * (3 - 2 * (192 * 192 + 192))),
        ({"mlp_ratio": 2}, -12 * (4 * 192 * 192 + 2 * 192)),
        ({"remat": True}, 0),
        ({"image_size": (224, 112)}, -98 * 192),
        ({"channels": 1}, -2 * 16 * 16 * 192),
    ],
    ids=str,
)
def test_what_each_option_adds(options, difference):
    assert count("vit_ti16", **options) - PUBLISHED["vit_ti16"] == difference


def test_names_are_listed_by_pattern():
    names = models.list_models("vit_[!c]*")
    assert len(names) == len(set(names)) == 35
    assert models.list_models("vit_s*") == [f"vit_s{p}" for p in (1, 2, 4, 8, 14, 16, 32)]
    assert models.list_models("resnet*") == []


@pytest.mark.parametrize("name", models.list_models())
def test_every_name_resolves_to_plain_values(name):
    resolved = models.options(name)
    assert set(json.loads(json.dumps(resolved))) == set(resolved)


@pytest.mark.parametrize("name", models.list_models("vit_[!c]*"))
def test_every_name_resolves_and_says_its_patch(name):
    resolved = models.options(name)
    patch = int(re.fullmatch("vit_[a-z]+([0-9]+)", name)[1])
    assert resolved["patch_size"] == (patch, patch)
    assert json.loads(json.dumps(resolved))["image_size"] == [224, 224]


def test_resolved_options_create_the_same_model():
    by_name = nnx.eval_shape(lambda: models.create("vit_ti32", rngs=nnx.Rngs(0)))
    resolved = models.options("vit_ti32")
    by_options = nnx.eval_shape(lambda: models.create("vit_b8", rngs=nnx.Rngs(0), **resolved))
    assert nnx.graphdef(by_name) == nnx.graphdef(by_options)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown model 'vit_s17'; did you mean 'vit_s1[46]?'"):
        models.create("vit_s17", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"unknown model 'xyz'; All names: .*list_models\(\)"):
        models.options("xyz")


@pytest.mark.parametrize("name", ["vit_s17", "resnet50", "xyz"])
def test_an_unknown_model_is_told_in_a_short_line(name):
    with pytest.raises(ValueError, match=r"cumulant_jax\.models\.list_models\(\)") as caught:
        models.options(name)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", [["vit_s16"], None, 3], ids=str)
def test_a_model_name_is_a_text(name):
    for call in (models.options, lambda name: models.create(name, rngs=nnx.Rngs(0))):
        with pytest.raises(TypeError, match="name must be the name of a model"):
            call(name)
    with pytest.raises(TypeError, match="pattern must be a shell pattern"):
        models.list_models(name)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        ValueError, match="unknown option of model 'vit_ti4' 'drop_pth'; did you mean 'drop_path'"
    ):
        models.create("vit_ti4", drop_pth=0.1, rngs=nnx.Rngs(0))


def test_an_unknown_attention_names_the_nearest():
    with pytest.raises(ValueError, match="unknown attention 'cumulent3'; did you mean 'cumulant3'"):
        models.create("vit_ti4", attention="cumulent3", rngs=nnx.Rngs(0))


def test_rngs_must_be_rngs():
    with pytest.raises(TypeError, match=r"rngs must be an nnx\.Rngs.*got int"):
        models.create("vit_ti4", rngs=0)
    for rngs in (nnx.Rngs(dropout=0), nnx.Rngs()):
        with pytest.raises(TypeError, match="rngs must have a stream 'params' or a default one"):
            models.create("vit_ti4", rngs=rngs)
        with pytest.raises(TypeError, match="rngs must have a stream 'params' or a default one"):
            models.ViT(models.ViTOptions(), rngs=rngs)


def test_rngs_may_have_the_one_stream_that_is_used():
    model = nnx.eval_shape(lambda: models.create("vit_nano16", rngs=nnx.Rngs(params=0)))
    assert models.count_parameters(model) == count("vit_nano16")


def test_a_module_wants_its_record():
    with pytest.raises(TypeError, match="options must be a ViTOptions, got dict"):
        models.ViT({"dim": 16}, rngs=nnx.Rngs(0))


def test_dtypes_are_taken_in_any_form():
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")):
        options = models.ViTOptions(dtype=dtype)
        assert options.dtype == "bfloat16"
