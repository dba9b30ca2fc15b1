"""The class-attention block against NumPy, with each published quirk on and off."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.class_attention import ClassAttentionBlock

TYPES = {"dtype": jnp.dtype("float32"), "param_dtype": jnp.dtype("float32")}


def array(variable):
    return np.asarray(variable[...], np.float64)


def norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * array(layer.scale) + array(layer.bias)


def linear(layer, x):
    return x @ array(layer.kernel) + array(layer.bias)


def by_hand(block, x, *, heads, tokens_norm, update_patches):
    """One example [tokens, dim], one head and one token at a time."""
    tokens, dim = x.shape
    size = dim // heads
    normed = norm(block.norm1, x)
    query = linear(block.attention.query, normed[0])
    key, value = np.split(linear(block.attention.key_value, normed), 2, axis=-1)
    attended = np.zeros(dim)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = [math.exp(query[part] @ key[t, part] / math.sqrt(size)) for t in range(tokens)]
        for t in range(tokens):
            attended[part] += scores[t] / sum(scores) * value[t, part]
    scale1, scale2 = array(block.layer_scale1.gamma), array(block.layer_scale2.gamma)
    token = x[0] + scale1 * linear(block.attention.out, attended)
    token = norm(block.norm2, token)
    gelu = np.vectorize(lambda h: 0.5 * h * (1 + math.erf(h / math.sqrt(2))))
    branch = linear(block.mlp.contract, gelu(linear(block.mlp.expand, token)))
    out = [token + scale2 * branch]
    for t in range(1, tokens):
        patch = x[t] + scale1 * normed[t] if update_patches else x[t]
        patch = norm(block.norm2, patch) if tokens_norm else patch
        out.append(2 * patch if update_patches else patch)
    return np.array(out)


@pytest.mark.parametrize("update_patches", [True, False])
@pytest.mark.parametrize("tokens_norm", [True, False])
@pytest.mark.parametrize("seed", [0])
def test_against_numpy(seed, tokens_norm, update_patches):
    quirks = {"tokens_norm": tokens_norm, "update_patches": update_patches}
    block = ClassAttentionBlock(
        dim=8, heads=2, hidden_dim=12, layer_scale=1.0, rngs=nnx.Rngs(seed), **quirks, **TYPES
    )
    random = np.random.default_rng(seed)
    for _, parameter in nnx.to_flat_state(nnx.state(block)):
        parameter[...] = jnp.asarray(0.5 * random.standard_normal(parameter.shape), jnp.float32)
    x = random.standard_normal((3, 6, 8))
    got = block(jnp.asarray(x, jnp.float32))
    for example in range(3):
        want = by_hand(block, x[example], heads=2, **quirks)
        np.testing.assert_allclose(got[example], want, rtol=0, atol=2e-5)


def test_without_patch_updates_the_patches_stay():
    block = ClassAttentionBlock(
        dim=8,
        heads=2,
        hidden_dim=8,
        tokens_norm=False,
        update_patches=False,
        rngs=nnx.Rngs(0),
        **TYPES,
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    np.testing.assert_array_equal(block(x)[:, 1:], x[:, 1:])
    assert np.abs(block(x)[:, 0] - x[:, 0]).max() > 0.1


def test_dropout_needs_its_three_keys():
    block = ClassAttentionBlock(
        dim=8,
        heads=2,
        hidden_dim=8,
        dropout=0.5,
        projection_dropout=0.5,
        rngs=nnx.Rngs(0),
        **TYPES,
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    keys = jax.random.split(jax.random.key(1), block.num_keys)
    for index in range(3):
        other = keys.at[index].set(jax.random.key(2))
        trained = block(x, train=True, keys=keys)
        assert np.abs(trained - block(x, train=True, keys=other)).max() > 1e-6, index
        np.testing.assert_array_equal(block(x, keys=keys), block(x, keys=other))
