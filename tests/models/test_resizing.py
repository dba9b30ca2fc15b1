"""Models at another resolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models


@pytest.mark.parametrize("size", ["48x32", "24x40"])
def test_a_resized_vit_gives_timms_logits(size, load_timm, set_params):
    weights, expected = load_timm("timm_vit_a_token")
    options = {"dim": 48, "depth": 2, "heads": 3, "num_classes": 10, "image_size": 32}
    height, width = map(int, size.split("x"))
    with jax.enable_x64(True):
        model = models.create(
            "vit_ti8", dtype="float64", param_dtype="float64", rngs=nnx.Rngs(0), **options
        )
        set_params(model, weights)
        resized = models.resize(model, image_size=(height, width))
        x = jnp.asarray(np.transpose(expected[f"x_{size}"], (0, 2, 3, 1)), "float64")
        logits = resized(x)
    np.testing.assert_allclose(logits, expected[f"logits_{size}_f64"], rtol=0, atol=1e-10)
    assert resized.options.image_size == (height, width)
    assert model.options.image_size == (32, 32)
    assert model.positions.position_embedding.shape == (1, 17, 48)


@pytest.mark.parametrize("name", ["vit_nano2", "crate_tiny"])
def test_everything_but_the_table_stays(name, small, images):
    model = small(name=name, patch_size=2)
    resized = models.resize(model, image_size=(4, 12))
    before, after = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, resized))
    assert set(before) == set(after)
    changed = [path for path in before if before[path].shape != after[path].shape]
    assert changed == [("positions", "position_embedding")]
    for path in set(before) - set(changed):
        np.testing.assert_array_equal(before[path][...], after[path][...])
    assert resized(images(size=(4, 12))).shape == (3, 5)
    fresh = nnx.eval_shape(
        lambda: type(model)(resized.options, rngs=nnx.Rngs(0))  # as if created at that size
    )
    assert nnx.graphdef(fresh) == nnx.graphdef(resized)


def test_computed_positions_need_no_resizing(small, images):
    """The model takes the size as it is; only its nominal size changes."""
    model = small(name="tost_tiny_12", patch_size=2)
    resized = models.resize(model, image_size=(5, 12))
    assert resized.options.grid == (3, 6)
    x = images(size=(5, 12))
    np.testing.assert_array_equal(model(x), resized(x))


def test_the_same_size_gives_the_same_model(small, images):
    model = small()
    np.testing.assert_array_equal(models.resize(model, image_size=8)(images()), model(images()))


def test_what_cannot_be_resized(small):
    model = small()
    with pytest.raises(ValueError, match="unknown option of ViT 'image_sise'; did you mean 'image"):
        models.resize(model, image_sise=16)
    with pytest.raises(
        ValueError, match=r"num_classes=3 changes arrays .*: head\.bias, head\.kernel"
    ):
        models.resize(model, num_classes=3)
    with pytest.raises(
        ValueError, match=r"depth=1 changes arrays that cannot be resized: blocks\.1"
    ):
        models.resize(model, depth=1)
    with pytest.raises(ValueError, match=r"image_size .* must be a multiple of patch_size"):
        models.resize(model, image_size=9)
    with pytest.raises(TypeError, match=r"model must be a model of cumulant_jax.models, got str"):
        models.resize("vit_s16", image_size=32)
    with pytest.raises(TypeError, match="got Linear"):
        models.resize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), image_size=32)
