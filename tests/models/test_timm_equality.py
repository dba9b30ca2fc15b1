"""Our ViT with the weights of a timm ViT gives what timm gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models

REFERENCES = {
    "timm_vit_a_token": {},
    "timm_vit_a_epsprobe": {},
    "timm_vit_b_avg_fcnorm": {"pool": "mean", "class_token": True},
    "timm_vit_c_layerscale": {"layer_scale": 0.1},
}
SIZE = {"dim": 48, "depth": 2, "heads": 3, "patch_size": 8, "num_classes": 10}


def build(set_params, weights, *, image_size=32, dtype="float32", **options):
    model = models.create(
        "vit_ti8",
        image_size=image_size,
        dtype=dtype,
        param_dtype=dtype,
        rngs=nnx.Rngs(0),
        **SIZE,
        **options,
    )
    set_params(model, weights)
    return model


def to_nhwc(x, dtype="float32"):
    return jnp.asarray(np.transpose(x, (0, 2, 3, 1)), dtype)


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, False) for name in REFERENCES), ("timm_vit_a_token", True)]
)
def test_float32_outputs_and_inner_arrays(name, remat, load_timm, set_params):
    weights, expected = load_timm(name)
    model = build(set_params, weights, remat=remat, **REFERENCES[name])
    logits, inside = model(to_nhwc(expected["x"]), return_intermediates=True)
    got = {**inside, "patch_tokens": inside["patch_embedding"], "logits": logits}
    assert logits.dtype == jnp.float32
    for key in ("patch_tokens", "embed", "block_0", "block_1", "pre_logits", "logits"):
        np.testing.assert_allclose(got[key], expected[key], rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", REFERENCES)
def test_float64_outputs_and_input_gradient(name, load_timm, set_params):
    weights, expected = load_timm(name)
    with jax.enable_x64(True):
        model = build(set_params, weights, dtype="float64", **REFERENCES[name])

        def loss(x):
            logits, inside = model(x, return_intermediates=True)
            chosen = jax.nn.log_softmax(logits)[jnp.arange(2), expected["ce_labels"]]
            return -chosen.mean(), {**inside, "logits": logits}

        x = to_nhwc(expected["x"], "float64")
        (value, got), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        assert got["logits"].dtype == jnp.float64
        for key in ("embed", "block_0", "block_1", "pre_logits", "logits"):
            np.testing.assert_allclose(
                got[key], expected[f"{key}_f64"], rtol=0, atol=1e-10, err_msg=key
            )
        np.testing.assert_allclose(value, expected["ce_loss_f64"], rtol=0, atol=1e-10)
        reference = np.transpose(expected["ce_grad_x_f64"], (0, 2, 3, 1))
        # The epsilon probe divides by a standard deviation near 1e-3, which scales its gradients
        # up.
        atol = 1e-10 * max(1.0, np.abs(reference).max())
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [(24, 40)])
def test_oblong_images(size, load_timm, set_params):
    weights, expected = load_timm("timm_vit_a_token")
    suffix = f"{size[0]}x{size[1]}"
    weights["positions.position_embedding"] = expected[f"pos_embed_{suffix}"]
    model = build(set_params, weights, image_size=size)
    logits = model(to_nhwc(expected[f"x_{suffix}"]))
    np.testing.assert_allclose(logits, expected[f"logits_{suffix}"], rtol=0, atol=2e-5)


MISTAKES = ["eps1e-5", "gelu_tanh"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_named_mistake_gives_the_reference_of_that_mistake(
    mistake, load_timm, set_params, monkeypatch
):
    """timm with another epsilon, or a tanh GELU, is what we are with the same change."""
    weights, expected = load_timm("timm_vit_a_token")
    wrong = expected[f"logits_if_{mistake}_f64"]
    exact = jax.nn.gelu
    if mistake == "gelu_tanh":
        monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate: exact(x, approximate=True))
    with jax.enable_x64(True):
        eps = 1e-5 if mistake == "eps1e-5" else 1e-6
        model = build(set_params, weights, dtype="float64", eps=eps)
        got = model(to_nhwc(expected["x"], "float64"))
    np.testing.assert_allclose(got, wrong, rtol=0, atol=1e-10)
    # Far above the tolerance of the float64 test, which therefore sees these mistakes.
    assert np.abs(np.asarray(got) - expected["logits_f64"]).max() > 1e-6


def test_qkv_projection_with_its_key_bias(load_timm, set_params):
    """Softmax cannot see the key bias, so the raw projection is compared."""
    weights, expected = load_timm("timm_vit_a_token")
    model = build(set_params, weights)
    block = model.blocks[0]
    qkv = block.attention.qkv(block.norm1(jnp.asarray(expected["embed"])))
    np.testing.assert_allclose(qkv, expected["qkv_0"], rtol=0, atol=2e-5)
