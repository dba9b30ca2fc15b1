"""Our joint ViViT with the weights of a Hugging Face ViViT gives what Hugging Face gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from tests.models.conftest import GOLDEN, read_safetensors
from tests.models.random_models import apply

REFERENCES = ["hf_vivit", "hf_vivit_epsprobe"]
NAMES = [
    ("vivit.embeddings.cls_token", "class_token"),
    ("vivit.embeddings.position_embeddings", "positions.position_embedding"),
    ("vivit.embeddings.patch_embeddings.projection.", "tubelet_embedding."),
    ("vivit.encoder.layer.", "blocks."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".attention.output.dense.", ".attention.out."),
    (".attention.attention.", ".attention."),
    (".intermediate.dense.", ".mlp.expand."),
    (".output.dense.", ".mlp.contract."),
    ("vivit.layernorm.", "norm."),
    ("classifier.", "head."),
]


def from_hugging_face(weights):
    """Names and layouts of Hugging Face's ViViT as ours; query, key and value become one array."""
    ours = {}
    for name, value in weights.items():
        for theirs, new in NAMES:
            name = name.replace(theirs, new)
        if name.endswith(".weight"):
            is_norm = "norm" in name
            name = name.removesuffix("weight") + ("scale" if is_norm else "kernel")
            order = {1: (0,), 2: (1, 0), 5: (2, 3, 4, 1, 0)}[value.ndim]
            value = value.transpose(order)
        ours[name] = value
    for name in [name for name in ours if ".query." in name]:
        parts = [ours.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        ours[name.replace("query", "qkv")] = np.concatenate(parts, axis=-1)
    return ours


def load(name):
    folder = GOLDEN / "interop"
    with np.load(folder / f"{name}.npz") as arrays:
        return from_hugging_face(read_safetensors(folder / f"{name}.safetensors")), dict(arrays)


def build(set_params, weights, *, dtype="float32", **options):
    model = models.create(
        "vivit_ti16x2",
        **{
            "image_size": 32,
            "frames": 4,
            "patch_size": 8,
            "dim": 48,
            "depth": 2,
            "heads": 3,
            "num_classes": 7,
            "dtype": dtype,
            "param_dtype": dtype,
            **options,
        },
        rngs=nnx.Rngs(0),
    )
    set_params(model, weights)
    return model


def to_ours(x, dtype="float32"):
    return jnp.asarray(np.transpose(x, (0, 1, 3, 4, 2)), dtype)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_float32_outputs_and_inner_arrays(name, remat, set_params):
    weights, expected = load(name)
    model = build(set_params, weights, remat=remat)
    call = jax.jit(lambda model, x: model(x, return_intermediates=True))
    logits, inside = call(model, to_ours(expected["x"]))
    assert logits.dtype == jnp.float32
    got = {"hidden_0": inside["embed"], "logits": logits}
    got |= {f"hidden_{i + 1}": inside[f"block_{i}"] for i in range(2)}
    for key, value in got.items():
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=2e-5, err_msg=key)
    last = expected["last_hidden_state"][:, 0]
    np.testing.assert_allclose(inside["pre_logits"], last, rtol=0, atol=2e-5)
    # Softmax cannot see a key bias, so the raw projection is compared.
    block = model.blocks[0]
    qkv = block.attention.qkv(block.norm1(jnp.asarray(expected["hidden_0"])))
    want = np.concatenate([expected[f"{part}_0"] for part in "qkv"], axis=-1)
    np.testing.assert_allclose(qkv, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_float64_outputs_and_input_gradient(name, set_params):
    weights, expected = load(name)
    with jax.enable_x64(True):
        model = build(set_params, weights, dtype="float64")

        def loss(x):
            logits, inside = model(x, return_intermediates=True)
            batch = jnp.arange(len(logits))
            chosen = jax.nn.log_softmax(logits)[batch, expected["ce_labels"]]
            hidden = [inside["embed"], inside["block_0"], inside["block_1"]]
            return -chosen.mean(), (logits, *hidden)

        x = to_ours(expected["x"], "float64")
        (value, got), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
        for key, array in zip(("logits", "hidden_0", "hidden_1", "hidden_2"), got, strict=True):
            np.testing.assert_allclose(
                array, expected[f"{key}_f64"], rtol=0, atol=1e-10, err_msg=key
            )
        np.testing.assert_allclose(value, expected["ce_loss_f64"], rtol=0, atol=1e-10)
        reference = np.transpose(expected["ce_grad_x_f64"], (0, 1, 3, 4, 2))
        # The epsilon probe divides by a standard deviation near 1e-3, which scales its gradients
        # up.
        atol = 1e-10 * max(1.0, np.abs(reference).max())
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("mistake", "options"), [("gelu", {"gelu": "erf"}), ("eps1e-05", {"eps": 1e-5})]
)
def test_another_option_gives_the_reference_of_that_option(mistake, options, set_params):
    weights, expected = load("hf_vivit")
    with jax.enable_x64(True):
        model = build(set_params, weights, dtype="float64", **options)
        got = apply(model, to_ours(expected["x"], "float64"))
    wrong = expected[f"logits_if_{mistake}_f64"]
    np.testing.assert_allclose(got, wrong, rtol=0, atol=1e-10)
    assert np.abs(np.asarray(got) - expected["logits_f64"]).max() > 1e-6
