"""The attention layers against the published implementations' arrays and against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.attention import KINDS
from cumulant_jax.models.layers import attention as layers

TYPES = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}
TYPES64 = {"dtype": jnp.dtype("float64"), "param_dtype": jnp.dtype("float64")}


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def numpy_layer_norm(x, scale, bias, eps=1e-6):
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + bias


# The published TSSA layer
# ------------------------------------------------------------------------------------------------

TSSA_NAMES = {
    "temperature": "temp",
    "qkv.kernel": "qkv.weight",
    "qkv.bias": "qkv.bias",
    "out.kernel": "to_out.0.weight",
    "out.bias": "to_out.0.bias",
}


def as_ours(name, value):
    return {"temperature": np.ravel, "kernel": np.transpose, "bias": np.asarray}[
        name.split(".")[-1]
    ](value)


def tssa_case(golden, file, prefix, types, set_params):
    """Output and named gradients on a reference case: ours and theirs, both by our names."""
    arrays = np.load(golden / f"{file}.npz")
    names = {n: t for n, t in TSSA_NAMES.items() if f"param/{t}" in arrays}
    layer = layers.TSSAttention(
        dim=64, heads=4, qkv_bias="qkv.bias" in names, rngs=nnx.Rngs(0), **types
    )
    set_params(layer, {n: as_ours(n, arrays[f"param/{t}"]) for n, t in names.items()})
    graphdef, params = nnx.split(layer)

    def scalar(params, x):
        out = nnx.merge(graphdef, params)(x)
        return jnp.sum(out * arrays[f"{prefix}cotangent"]), out

    x = jnp.asarray(arrays[f"{prefix}x"], types["dtype"])
    # One program is faster to compile than its operations one by one.
    gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))
    (_, out), (by_param, by_x) = gradients(params, x)
    suffix = "_f64"
    got = {"out": out, "x": by_x}
    want = {"out": arrays[f"{prefix}out{suffix}"], "x": arrays[f"{prefix}grad_x{suffix}"]}
    for path, gradient in nnx.to_flat_state(by_param):
        name = ".".join(map(str, path))
        got[name] = gradient[...]
        want[name] = as_ours(name, arrays[f"{prefix}grad/{names[name]}{suffix}"])
    assert set(got) == {"out", "x", *names}
    return got, want


@pytest.mark.parametrize("prefix", ["", "edge_n1/", "edge_zero/", "edge_big/"])
@pytest.mark.parametrize("file", ["tssa_vision", "tssa_vision_nobias"])
def test_tssa_equals_the_published_layer_in_float64(file, prefix, golden, set_params):
    with jax.enable_x64(True):
        got, want = tssa_case(golden, file, prefix, TYPES64, set_params)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("prefix", ["", "edge_n1/", "edge_zero/"])
@pytest.mark.parametrize("file", ["tssa_vision", "tssa_vision_nobias"])
def test_tssa_equals_the_published_layer_in_float32(file, prefix, golden, set_params):
    got, want = tssa_case(golden, file, prefix, TYPES, set_params)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-5, err_msg=name)


# Attention branches of the published vision models
# -----------------------------------------------------------------------


def branch_input(arrays, block, size="in64x96"):
    """What the attention layer of a block of the published skeleton sees, computed in NumPy."""
    if block == 0:
        positions = arrays[f"{size}/pos_encoding"]
        positions = positions.reshape(*positions.shape[:2], -1).transpose(0, 2, 1)
        x = arrays[f"{size}/patch_embed"] + positions
    else:
        x = arrays[f"{size}/block{block - 1}"]
    norm = f"sd/blocks.{block}.norm1"
    return numpy_layer_norm(x, arrays[f"{norm}.weight"], arrays[f"{norm}.bias"])


BRANCHES = {
    "tost_vision_tiny": ("tssa", {"temperature": "temp"}, "to_out.0"),
    "xcit_vision_tiny": ("xca", {"temperature": "temperature"}, "proj"),
    "vit_vision_tiny": ("softmax", {}, "proj"),
}


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("file", BRANCHES)
def test_branch_of_the_published_models(file, block, golden, set_params):
    kind, names, out = BRANCHES[file]
    arrays = np.load(golden / f"{file}.npz")
    names = {
        **names,
        "qkv.kernel": "qkv.weight",
        "qkv.bias": "qkv.bias",
        "out.kernel": f"{out}.weight",
        "out.bias": f"{out}.bias",
    }
    layer = layers.attention_layer(
        kind, dim=48, heads=4, qk_norm=None, query_scale=None, eps=1e-6, rngs=nnx.Rngs(0), **TYPES
    )
    prefix = f"sd/blocks.{block}.attn."
    set_params(layer, {ours: as_ours(ours, arrays[prefix + n]) for ours, n in names.items()})
    got = layer(jnp.asarray(branch_input(arrays, block), jnp.float32))
    want = arrays[f"in64x96/block{block}_attn"]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


# Options of the query, key and value layer
# -------------------------------------------------------------------------------


def qkv_layer(seed, **options):
    """A layer whose every parameter is random, so that none can be ignored unseen."""
    layer = layers.QKVAttention(dim=12, heads=3, rngs=nnx.Rngs(seed), **{**TYPES, **options})
    graphdef, params = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [jax.random.normal(k, leaf.shape) * 0.5 for k, leaf in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def numpy_qkv_layer(layer, x, qk_norm=None, query_scale=False):
    def f64(parameter):
        return np.asarray(parameter[...], np.float64)

    batch, tokens, dim = x.shape
    qkv = np.asarray(x, np.float64) @ f64(layer.qkv.kernel) + f64(layer.qkv.bias)
    q, k, v = qkv.reshape(batch, tokens, 3, 3, dim // 3).transpose(2, 0, 3, 1, 4)
    if qk_norm == "layer":
        q = numpy_layer_norm(q, f64(layer.query_norm.scale), f64(layer.query_norm.bias))
        k = numpy_layer_norm(k, f64(layer.key_norm.scale), f64(layer.key_norm.bias))
    if qk_norm == "rms":
        q = q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6) * f64(layer.query_norm.scale)
        k = k / np.sqrt((k**2).mean(-1, keepdims=True) + 1e-6) * f64(layer.key_norm.scale)
    if query_scale:
        q = q * f64(layer.query_scale)[:, None, None]
    weights = softmax(q @ k.transpose(0, 1, 3, 2) * (dim // 3) ** -0.5)
    merged = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, dim)
    return merged @ f64(layer.out.kernel) + f64(layer.out.bias)


@pytest.mark.parametrize("query_scale", [None, 0.7])
@pytest.mark.parametrize("qk_norm", [None, "layer", "rms"])
@pytest.mark.parametrize("seed", [0])
def test_qk_norm_and_query_scale_against_numpy(seed, qk_norm, query_scale):
    layer = qkv_layer(seed, qk_norm=qk_norm, query_scale=query_scale)
    x = jax.random.normal(jax.random.key(seed + 1), (2, 7, 12))
    want = numpy_qkv_layer(layer, x, qk_norm, query_scale is not None)
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("init", [1.0, 0.25])
def test_query_scale_starts_at_its_init_and_is_absent_without_one(init):
    layer = layers.QKVAttention(dim=12, heads=3, query_scale=init, rngs=nnx.Rngs(0), **TYPES)
    np.testing.assert_array_equal(layer.query_scale[...], np.full(3, init, np.float32))
    plain = layers.QKVAttention(dim=12, heads=3, rngs=nnx.Rngs(0), **TYPES)
    assert plain.query_scale is None
    assert plain.query_norm is None


@pytest.mark.parametrize("seed", [0])
def test_mssa_is_softmax_with_one_projection(seed):
    layer = layers.MSSAttention(dim=12, heads=3, qkv_bias=False, rngs=nnx.Rngs(seed), **TYPES)
    assert layer.qkv.kernel.shape == (12, 12)
    assert layer.qkv.bias is None
    layer.qkv.kernel[...] = jax.random.normal(jax.random.key(seed), (12, 12))
    x = jax.random.normal(jax.random.key(seed + 1), (2, 7, 12))
    w = (
        (np.asarray(x, np.float64) @ layer.qkv.kernel[...])
        .reshape(2, 7, 3, 4)
        .transpose(0, 2, 1, 3)
    )
    attended = softmax(w @ w.transpose(0, 1, 3, 2) / 2) @ w
    want = attended.transpose(0, 2, 1, 3).reshape(2, 7, 12) @ np.asarray(layer.out.kernel[...])
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=2e-5)


def test_a_callable_is_called_with_heads_apart_and_the_options():
    seen = {}

    def attention(query, key, value, *, factor):
        seen.update(query=query.shape, key=key.shape, value=value.shape)
        return value * factor

    layer = layers.QKVAttention(
        dim=12, heads=3, kind=attention, options={"factor": 2.0}, rngs=nnx.Rngs(0), **TYPES
    )
    x = jax.random.normal(jax.random.key(0), (2, 7, 12))
    value = np.asarray(x @ layer.qkv.kernel[...][:, 24:])
    np.testing.assert_allclose(layer(x), 2 * value @ layer.out.kernel[...], rtol=0, atol=1e-6)
    assert seen == dict.fromkeys(("query", "key", "value"), (2, 7, 3, 4))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_options_reach_the_attention_function(reduction):
    """The sum form is the mean form times the tokens; the output bias is zero at the start."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 12))
    options = {"kind": "cumulant3", "rngs": nnx.Rngs(0)}
    mean = layers.QKVAttention(dim=12, heads=3, **{**options, "rngs": nnx.Rngs(0)}, **TYPES)(x)
    layer = layers.QKVAttention(
        dim=12,
        heads=3,
        kind="cumulant3",
        options={"reduction": reduction},
        rngs=nnx.Rngs(0),
        **TYPES,
    )
    factor = {"mean": 1, "sum": 7}[reduction]
    np.testing.assert_allclose(layer(x), mean * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["cumulant3", "tssa", "xca", "mssa"])
def test_projection_dropout_acts_in_training_only(kind):
    layer = layers.attention_layer(
        kind,
        dim=12,
        heads=3,
        qk_norm=None,
        query_scale=None,
        eps=1e-6,
        projection_dropout=0.5,
        rngs=nnx.Rngs(0),
        **TYPES,
    )
    x = jax.random.normal(jax.random.key(0), (8, 7, 12))
    evaluated, trained = layer(x), layer(x, train=True, rng=jax.random.key(1))
    kept = np.asarray(trained) != 0
    assert 0.4 < kept.mean() < 0.6
    np.testing.assert_allclose(trained[kept], 2 * evaluated[kept], rtol=1e-5, atol=1e-7)


def test_every_kind_of_the_library_has_a_layer():
    assert set(layers.attention_kinds()) == {*KINDS, "tssa", "xca", "mssa"}
