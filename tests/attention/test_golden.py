"""Token statistics and cross-covariance against arrays of the published implementations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cumulant_jax as cj

GOLDEN = Path(__file__).parents[1] / "golden"


def layer(parameters, x):
    """The published vision layer: one projection, the operator, one output projection."""
    heads = parameters["temp"].shape[0]
    w = x @ parameters["qkv.weight"].T + parameters.get("qkv.bias", 0.0)
    w = w.reshape(*w.shape[:-1], heads, -1)
    out = cj.token_statistics_attention(w, temperature=parameters["temp"][:, 0])
    out = out.reshape(*out.shape[:-2], -1)
    return out @ parameters["to_out.0.weight"].T + parameters["to_out.0.bias"]


@pytest.fixture(params=["tssa_vision", "tssa_vision_nobias"])
def arrays(request):
    return dict(np.load(GOLDEN / f"{request.param}.npz"))


def parameters_of(arrays, dtype):
    return {
        n.removeprefix("param/"): jnp.asarray(a, dtype)
        for n, a in arrays.items()
        if n.startswith("param/")
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layer_output_and_every_gradient(arrays, dtype, x64):
    parameters, x = parameters_of(arrays, dtype), jnp.asarray(arrays["x"], dtype)
    cotangent = jnp.asarray(arrays["cotangent"], dtype)
    out, pull_back = jax.vjp(layer, parameters, x)
    gradients, grad_x = pull_back(cotangent)
    exact = dtype == "float64" and "out_f64" in arrays
    tolerance = 1e-10 if exact else 2e-5
    suffix = "_f64" if exact else ""
    np.testing.assert_allclose(out, arrays[f"out{suffix}"], atol=tolerance, rtol=0)
    expected = arrays.get(f"grad_x{suffix}", arrays["grad_x"])
    tolerance = tolerance if f"grad_x{suffix}" in arrays else 2e-5
    np.testing.assert_allclose(grad_x, expected, atol=tolerance * np.abs(expected).max(), rtol=0)
    names = {n for n in arrays if n.startswith("grad/") and not n.endswith("_f64")}
    assert names == {f"grad/{n}" for n in gradients}, "every parameter's gradient is compared"
    for name, gradient in gradients.items():
        key = f"grad/{name}{suffix}"
        expected = arrays.get(key, arrays[f"grad/{name}"])
        tolerance = 1e-10 if exact and key in arrays else 2e-5
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(gradient, expected, atol=tolerance * scale, rtol=0, err_msg=name)


def test_internals(arrays):
    parameters = parameters_of(arrays, "float32")
    w = jnp.moveaxis(jnp.asarray(arrays["w"]), 1, 2)
    membership, moment = cj.token_memberships(w, temperature=parameters["temp"][:, 0])
    np.testing.assert_allclose(jnp.moveaxis(membership, 1, 2), arrays["Pi"], atol=2e-6)
    np.testing.assert_allclose(moment[:, :, None], arrays["dots"], rtol=2e-5)


@pytest.mark.parametrize("edge", ["edge_n1", "edge_zero", "edge_big"])
def test_edges(arrays, edge):
    parameters = parameters_of(arrays, "float32")
    x = jnp.asarray(arrays[f"{edge}/x"])
    out, pull_back = jax.vjp(layer, parameters, x)
    scale = max(1.0, np.abs(arrays[f"{edge}/out"]).max())
    np.testing.assert_allclose(out, arrays[f"{edge}/out"], atol=2e-5 * scale)
    for gradient in jax.tree.leaves(pull_back(jnp.ones_like(out))):
        assert np.isfinite(gradient).all()


def test_cross_covariance_inside_the_published_model():
    """The attention branch of each block, from the block's own stored input and weights."""
    arrays = dict(np.load(GOLDEN / "xcit_vision_tiny.npz"))
    prefix = "in32x32"
    blocks = sorted({n.split("/")[1] for n in arrays if n.startswith(f"{prefix}/block")})
    blocks = [b for b in blocks if b.endswith("_attn")]
    assert blocks
    entering = arrays[f"{prefix}/patch_embed"] + _position(arrays, prefix)
    for name in blocks:
        index = name.removeprefix("block").removesuffix("_attn")
        sd = {
            n.removeprefix(f"sd/blocks.{index}."): a
            for n, a in arrays.items()
            if n.startswith(f"sd/blocks.{index}.")
        }
        np.testing.assert_allclose(_xca_branch(sd, entering), arrays[f"{prefix}/{name}"], atol=2e-5)
        entering = arrays[f"{prefix}/block{index}"]


def _position(arrays, prefix):
    position = arrays[f"{prefix}/pos_encoding"]
    return np.moveaxis(position.reshape(*position.shape[:2], -1), 1, 2)


def _xca_branch(sd, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    x = (x - mean) / np.sqrt(variance + 1e-6) * sd["norm1.weight"] + sd["norm1.bias"]
    qkv = jnp.asarray(x @ sd["attn.qkv.weight"].T + sd["attn.qkv.bias"])
    temperature = jnp.asarray(sd["attn.temperature"]).reshape(-1)
    query, key, value = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, temperature.size, -1), -3, 0)
    out = cj.cross_covariance_attention(query, key, value, temperature=temperature)
    return out.reshape(*out.shape[:-2], -1) @ sd["attn.proj.weight"].T + sd["attn.proj.bias"]


def causal_layer(parameters, x):
    """The published causal layer, without biases."""
    heads = parameters["temp"].shape[0]
    w = x @ parameters["c_attn.weight"].T
    w = w.reshape(*w.shape[:-1], heads, -1)
    out = cj.token_statistics_attention(
        w,
        temperature=parameters["temp"][:, 0],
        denominator_bias=parameters["denom_bias"][:, : x.shape[-2], 0],
        is_causal=True,
    )
    return out.reshape(*out.shape[:-2], -1) @ parameters["c_proj.weight"].T


@pytest.mark.parametrize("case", ["", "edge_n1/", "edge_zero/", "edge_big/"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_causal_layer_output_and_every_gradient(case, dtype, x64):
    arrays = dict(np.load(GOLDEN / "tssa_causal.npz"))
    parameters = parameters_of(arrays, dtype)
    suffix, tolerance = ("_f64", 1e-10) if dtype == "float64" else ("", 2e-5)
    out, pull_back = jax.vjp(causal_layer, parameters, jnp.asarray(arrays[f"{case}x"], dtype))
    gradients, grad_x = pull_back(jnp.asarray(arrays[f"{case}cotangent"], dtype))
    actual = {"out": out, "grad_x": grad_x} | {f"grad/{n}": g for n, g in gradients.items()}
    for name, value in actual.items():
        expected = arrays[f"{case}{name}{suffix}"]
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(
            value, expected, atol=tolerance * scale, rtol=0, err_msg=f"{case}{name}"
        )
