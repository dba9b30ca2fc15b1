"""Our ToST, XCiT and ViT on its skeleton give what the published code gives with their weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.attention import attention_weights, token_memberships
from cumulant_jax.models.layers import positions
from cumulant_jax.models.layers.attention import TSSAttention

ATTENTION = {"tost": "tssa", "xcit": "xca", "vit": "softmax"}
SIZE = {"dim": 48, "depth": 2, "heads": 4, "num_classes": 10, "layer_scale": 1.0}
INPUTS = ["in32x32", "in64x96"]
MODELS_AND_INPUTS = [(name, size) for name in ATTENTION for size in INPUTS]
# XCiT and ViT differ from ToST in their attention alone, which one input shows.
MOST_OF_THEM_SLOW = [
    pytest.param(name, size, marks=[] if name == "tost" else [pytest.mark.slow])
    for name, size in MODELS_AND_INPUTS
]

_NAMES = [
    ("cls_token", "class_token"),
    ("cls_attn_blocks.", "class_blocks."),
    ("pos_embeder.token_projection.", "positions.projection."),
    (".attn.temperature", ".attention.temperature"),
    (".attn.temp", ".attention.temperature"),
    (".attn.proj.", ".attention.out."),
    (".attn.to_out.0.", ".attention.out."),
    (".attn.qkv.", ".attention.qkv."),
    (".mlp.fc1.", ".mlp.expand."),
    (".mlp.fc2.", ".mlp.contract."),
]


def from_published(arrays):
    """Names and layouts of the published state dict as ours, a class block's qkv split in two."""
    ours = {}
    for name, value in arrays.items():
        if name.endswith("num_batches_tracked"):
            continue
        for theirs, new in _NAMES:
            name = name.replace(theirs, new)
        name = _stem_name(name)
        for gamma in "12":
            name = name.replace(f".gamma{gamma}", f".layer_scale{gamma}.gamma")
        if name.endswith("temperature"):
            value = value.reshape(-1)
        if name.endswith(".weight"):
            is_norm = value.ndim == 1
            name = name.removesuffix("weight") + ("scale" if is_norm else "kernel")
            if value.ndim == 4:
                value = value.transpose(2, 3, 1, 0)
            elif value.ndim == 2:
                value = value.T
        if name == "positions.projection.kernel":
            value = value[0, 0]
        if name.startswith("class_blocks") and ".qkv." in name:
            dim = value.shape[-1] // 3
            ours[name.replace("qkv", "query")] = value[..., :dim]
            ours[name.replace("qkv", "key_value")] = value[..., dim:]
        else:
            ours[name] = value
    return ours


def _stem_name(name):
    """The stem: patch_embed.proj.{2 i}.{0: convolution, 1: norm} in the published code."""
    if not name.startswith("patch_embed."):
        return name
    _, _, step, layer, last = name.split(".")
    last = {"running_mean": "mean", "running_var": "var"}.get(last, last)
    layer = ("convolutions", "norms")[int(layer)]
    return f"patch_embedding.{layer}.{int(step) // 2}.{last}"


def section(arrays, prefix):
    return {
        n.removeprefix(prefix): a
        for n, a in arrays.items()
        if n.startswith(prefix) and not n.endswith("_f64")
    }


@pytest.fixture(scope="module")
def published():
    """A function from a family to the arrays of its reference model."""
    folder = Path(__file__).parents[1] / "golden"
    loaded = {name: dict(np.load(folder / f"{name}_vision_tiny.npz")) for name in ATTENTION}
    return loaded.__getitem__


def build(name, weights, *, dtype="float32", **options):
    """A model of the reference's size that holds its weights, every one of them used."""
    model = models.create(
        f"{'vit_cab' if name == 'vit' else name}_tiny_12",
        dtype=dtype,
        param_dtype=dtype,
        rngs=nnx.Rngs(0),
        **{**SIZE, **options},
    )
    set_variables(model, from_published(weights))
    return model


def set_variables(model, values):
    variables = flat(nnx.state(model))
    assert sorted(values) == sorted(variables)
    for name, value in values.items():
        assert variables[name].shape == value.shape, name
        variables[name][...] = jnp.asarray(value, variables[name].dtype)


def flat(state):
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def to_nhwc(x, dtype="float32"):
    return jnp.asarray(np.transpose(x, (0, 2, 3, 1)), dtype)


def close(got, want, name, *, tolerance=2e-5):
    """Within a tolerance of the largest entry, or of 1 where that is smaller."""
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "size"), MODELS_AND_INPUTS)
def test_outputs_and_inner_arrays(name, size, remat, published):
    arrays = published(name)
    want = section(arrays, f"{size}/")
    model = build(name, section(arrays, "sd/"), remat=remat)
    logits, inside = jax.jit(lambda x: model(x, return_intermediates=True))(to_nhwc(want["x"]))
    position = want["pos_encoding"].reshape(2, 48, -1).swapaxes(1, 2)
    close(inside["patch_embedding"], want["patch_embed"], "patch_embed")
    close(inside["embed"], want["patch_embed"] + position, "pos_encoding")
    for index in range(2):
        close(inside[f"attention_{index}"], want[f"block{index}_attn"], f"attention {index}")
        close(inside[f"block_{index}"], want[f"block{index}"], f"block {index}")
        close(inside[f"class_block_{index}"], want[f"cls_block{index}"], f"class block {index}")
    close(inside["pre_logits"], want["final_norm"][:, 0], "final_norm")
    close(logits, want["logits"], "logits")
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize(("name", "size"), MOST_OF_THEM_SLOW)
@pytest.mark.parametrize("option", ["tokens_norm", "use_pos"])
def test_an_option_off(option, name, size, published):
    want = section(published(name), f"{size}/")
    weights = section(published(name), "sd/")
    options = {"tokens_norm": {"tokens_norm": False}, "use_pos": {"position": "none"}}[option]
    if option == "use_pos":
        weights = {n: w for n, w in weights.items() if not n.startswith("pos_embeder")}
    model = build(name, weights, **options)
    logits = jax.jit(model)(to_nhwc(want["x"]))
    close(logits, want[f"logits_{option}_false"], option)


@pytest.mark.parametrize(("name", "size"), MODELS_AND_INPUTS)
def test_float64_logits(name, size, published, monkeypatch):
    """The published code has its sines in float32 even here. For one grid they are stored, and we
    agree to rounding; for the other, torch's float32 sines differ from the exact ones in the last
    bit.
    """
    arrays = published(name)
    tolerance = 1e-7
    if size == "in32x32":
        table = raw_table("2x2")
        monkeypatch.setattr(positions, "fourier_2d", lambda grid: {(2, 2): table}[grid])
        tolerance = 1e-10
    with jax.enable_x64(True):
        model = build(name, section(arrays, "sd/"), dtype="float64")
        logits = jax.jit(model)(to_nhwc(arrays[f"{size}/x"], "float64"))
        assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, arrays[f"{size}/logits_f64"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", INPUTS)
def test_memberships_and_class_maps(size, published):
    """What the figures of the paper show can be computed from the layers."""
    arrays = published("tost")
    want = section(arrays, f"{size}/")
    model = build("tost", section(arrays, "sd/"))
    _, inside = model(to_nhwc(want["x"]), return_intermediates=True)
    x = inside["embed"]
    for index, block in enumerate(model.blocks):
        w = block.attention.qkv(block.norm1(x)).reshape(2, -1, 4, 12)
        membership, moment = token_memberships(w, temperature=block.attention.temperature[...])
        close(membership.swapaxes(1, 2), want[f"block{index}_Pi"], f"membership {index}")
        close(moment[:, :, None], want[f"block{index}_dots"], f"second moment {index}")
        x = inside[f"block_{index}"]
    token = jnp.broadcast_to(model.class_token[...], (2, 1, 48))
    x = jnp.concatenate([token, x], axis=1)
    for index, block in enumerate(model.class_blocks):
        normed = block.norm1(x)
        query = block.attention.query(normed[:, :1]).reshape(2, 1, 4, 12)
        key = block.attention.key_value(normed)[..., :48].reshape(2, -1, 4, 12)
        weights = attention_weights(query, key, kind="softmax")
        close(weights[:, :, 0], want[f"cls_block{index}_attn_map"], f"class map {index}")
        x = inside[f"class_block_{index}"]


def gradients(model, images, cotangent, *, train):
    """Logits, gradients of sum(logits * cotangent) and the other variables after the call."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params, rest, images):
        def loss(params, images):
            model = nnx.merge(graphdef, params, rest)
            logits = model(images, train=train)
            return jnp.sum(logits * cotangent), (logits, nnx.state(model, nnx.BatchStat))

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, images)

    (by_parameter, by_image), (logits, after) = run(params, rest, images)
    return logits, {n: g[...] for n, g in flat(by_parameter).items()}, by_image, flat(after)


def test_training_with_every_gradient_and_the_running_statistics(published):
    arrays = published("tost")
    want = section(arrays, "train64x96/")
    model = build("tost", section(arrays, "sd/"))
    images = to_nhwc(arrays["in64x96/x"])
    logits, by_parameter, by_image, after = gradients(model, images, want["cotangent"], train=True)
    close(logits, want["logits"], "logits")
    close(by_image, np.transpose(want["grad_x"], (0, 2, 3, 1)), "images")
    expected = from_published(section(want, "grad/"))
    assert sorted(by_parameter) == sorted(expected)
    for name, gradient in by_parameter.items():
        close(gradient, expected[name], name)
    statistics = from_published(section(want, "buffers_after/"))
    assert sorted(after) == sorted(statistics)
    for name, value in after.items():
        close(value[...], statistics[name], name)
        before = from_published(section(arrays, "sd/"))[name]
        assert np.abs(value[...] - before).max() > 1e-3, name


def test_evaluation_gradients(published):
    arrays = published("tost")
    want = section(arrays, "evalgrad64x96/")
    model = build("tost", section(arrays, "sd/"))
    before = {n: np.asarray(v[...]) for n, v in flat(nnx.state(model, nnx.BatchStat)).items()}
    _, by_parameter, by_image, after = gradients(
        model, to_nhwc(arrays["in64x96/x"]), arrays["train64x96/cotangent"], train=False
    )
    close(by_image, np.transpose(want["grad_x"], (0, 2, 3, 1)), "images")
    expected = from_published(section(want, "grad/"))
    assert len(expected) == 11
    for name, gradient in expected.items():
        close(by_parameter[name], gradient, name)
    for name, value in after.items():
        np.testing.assert_array_equal(value[...], before[name])


def raw_table(grid):
    folder = Path(__file__).parents[1] / "golden"
    raw = np.load(folder / "pos_fourier.npz")[f"raw_{grid}"]
    return raw[0].reshape(64, -1).T


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 5), (14, 14)])
def test_fourier_table(grid):
    """One unit in the last place of float32 at most: the published sines are torch's."""
    table = positions.fourier_2d(grid)
    want = raw_table(f"{grid[0]}x{grid[1]}")
    assert table.dtype == want.dtype == np.float32
    np.testing.assert_allclose(table, want, rtol=0, atol=6e-8)


LAYERS = ["tssa_vision", "tssa_vision_nobias"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", ["", "edge_n1/", "edge_zero/", "edge_big/"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_with_every_gradient(name, case, dtype, golden):
    with np.load(golden / f"{name}.npz") as file, jax.enable_x64(dtype == "float64"):
        arrays = dict(file)
        suffix, tolerance = ("_f64", 1e-10) if dtype == "float64" else ("", 2e-5)
        layer = TSSAttention(
            dim=64,
            heads=4,
            qkv_bias=name == "tssa_vision",
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            rngs=nnx.Rngs(0),
        )
        set_variables(layer, layer_names(section(arrays, "param/")))
        graphdef, params = nnx.split(layer)
        x = jnp.asarray(arrays[f"{case}x"], dtype)
        call = lambda params, x: nnx.merge(graphdef, params)(x)  # noqa: E731
        out, pull_back = jax.vjp(call, params, x)
        by_parameter, by_x = pull_back(jnp.asarray(arrays[f"{case}cotangent"], dtype))
        close(out, arrays[f"{case}out{suffix}"], "out", tolerance=tolerance)
        close(by_x, arrays[f"{case}grad_x{suffix}"], "x", tolerance=tolerance)
        names = [n for n in arrays if n.startswith(f"{case}grad/") and not n.endswith("_f64")]
        want = layer_names({n.removeprefix(f"{case}grad/"): arrays[n + suffix] for n in names})
        got = flat(by_parameter)
        assert sorted(got) == sorted(want)
        for parameter, gradient in got.items():
            close(gradient[...], want[parameter], parameter, tolerance=tolerance)


def layer_names(arrays):
    return {
        n.removeprefix("layer.attention."): a
        for n, a in from_published({f"layer.attn.{n}": a for n, a in arrays.items()}).items()
    }
