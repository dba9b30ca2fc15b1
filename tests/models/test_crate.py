"""CRATE against a second implementation, and its options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models


def array(variable):
    return np.asarray(variable[...], np.float64)


def norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * array(layer.scale) + array(layer.bias)


def linear(layer, x):
    return x @ array(layer.kernel) + (array(layer.bias) if layer.bias is not None else 0)


def by_hand(model, image, *, pool):
    """One image [8, 8, channels] through the equations of the paper, token by token."""
    options = model.options
    dim, heads = options.dim, options.heads
    size = dim // heads
    tokens = [array(model.class_token)[0, 0]]
    for row in range(4):
        for column in range(4):
            pixels = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(-1)
            part = model.patch_embedding
            pixels = linear(part.projection, norm(part.pixel_norm, pixels))
            tokens.append(norm(part.token_norm, pixels))
    x = np.array(tokens) + array(model.positions.position_embedding)[0]
    for block in model.blocks:
        w = linear(block.attention.qkv, norm(block.norm1, x))
        attended = np.zeros_like(x)
        for head in range(heads):
            part = w[:, head * size : (head + 1) * size]  # U_k^T Z of the paper, transposed
            for t in range(len(x)):
                scores = np.exp(part @ part[t] / np.sqrt(size))
                attended[t, head * size : (head + 1) * size] = scores @ part / scores.sum()
        x = norm(block.norm2, x + linear(block.attention.out, attended))
        dictionary = array(block.ista.kernel)
        for t in range(len(x)):
            gradient = dictionary.T @ x[t] - dictionary.T @ dictionary @ x[t]
            x[t] = np.maximum(x[t] + options.step_size * (gradient - options.sparsity), 0)
    pooled = x[0] if pool == "token" else x.mean(0)
    return linear(model.head, norm(model.norm, pooled))


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("seed", [0])
def test_against_the_equations(seed, pool, small, images):
    model = small(
        name="crate_tiny", patch_size=2, seed=seed, pool=pool, step_size=0.2, sparsity=0.3
    )
    x = images(seed)
    got = model(x)
    for example in range(3):
        want = by_hand(model, np.asarray(x[example], np.float64), pool=pool)
        np.testing.assert_allclose(got[example], want, rtol=0, atol=2e-5)


def test_the_named_models_are_the_published_ones():
    for name in models.list_models("crate_*"):
        options = models.options(name)
        assert options["attention"] == "mssa"
        assert not options["qkv_bias"]
        assert (options["step_size"], options["sparsity"], options["eps"]) == (0.1, 0.1, 1e-5)
    assert models.list_models("crate_*") == [
        "crate_tiny",
        "crate_small",
        "crate_base",
        "crate_large",
    ]


def test_blocks_give_codes_that_are_nonnegative_and_sparse(small, images):
    _, inside = small(name="crate_tiny", patch_size=2)(images(), return_intermediates=True)
    for index in range(2):
        code = inside[f"block_{index}"]
        assert code.min() == 0
        assert 0.1 < np.mean(code == 0) < 0.9


@pytest.mark.parametrize("kind", ["softmax", "cumulant3", "tssa"])
def test_other_kinds(kind, small, images):
    model = small(name="crate_tiny", patch_size=2, attention=kind, depth=1)
    graphdef, state = nnx.split(model)
    gradients = jax.jit(
        jax.grad(lambda state: jnp.sum(jnp.sin(nnx.merge(graphdef, state)(images()))))
    )(state)
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.abs(gradient[...]).max() > 0, path


@pytest.mark.parametrize("rate", ["dropout", "projection_dropout", "drop_path"])
def test_each_rate_acts_in_training_and_needs_a_key(rate, small, images):
    model = small(name="crate_tiny", patch_size=2, depth=1, **{rate: 0.5})
    with pytest.raises(ValueError, match=f"rng must be a key when train=True and {rate} is above"):
        model(images(), train=True)
    first, second = (model(images(), train=True, rng=jax.random.key(seed)) for seed in (0, 1))
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(model(images()), model(images(), rng=jax.random.key(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": -0.1}, "step_size must be at least 0"),
        ({"sparsity": -1}, "sparsity must be at least 0"),
        ({"pool": "max"}, "unknown pool 'max'"),
        ({"image_size": 30}, r"image_size \(30, 30\) must be a multiple of patch_size"),
        ({"position": "sine"}, "unknown position 'sine'"),
        ({"query_scale": 1.0}, "query_scale must be None with attention='mssa'"),
    ],
    ids=str,
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        models.CRATEOptions(**options)


def test_a_module_wants_its_record_and_whole_patches(small):
    with pytest.raises(TypeError, match="options must be a CRATEOptions, got ViTOptions"):
        models.CRATE(models.ViTOptions(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="positive multiples of 2 and 2"):
        small(name="crate_tiny", patch_size=2)(np.zeros((1, 7, 8, 2), "float32"))
