"""The attention kinds inside Flax's own modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cumulant_jax as cj
from cumulant_jax.attention import KINDS


def nnx_layer(kind, **options):
    return nnx.MultiHeadAttention(
        num_heads=4,
        in_features=32,
        decode=False,
        attention_fn=cj.as_flax_attention_fn(kind, **options),
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nnx_layer_equals_the_function_on_its_projections(kind):
    layer = nnx_layer(kind)
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    mask = jnp.arange(10) < jnp.array([10, 6])[:, None]
    expected = cj.attention(kind, layer.query(x), layer.key(x), layer.value(x), mask=mask)
    actual = layer(x, mask=mask[:, None, None, :])
    np.testing.assert_allclose(actual, layer.out(expected), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_linen_layer_equals_the_nnx_layer(kind):
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    linen = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=cj.as_flax_attention_fn(kind))
    variables = linen.init(jax.random.key(1), x)
    layer = nnx_layer(kind)
    for name in ("query", "key", "value", "out"):
        for part in ("kernel", "bias"):
            getattr(getattr(layer, name), part)[...] = variables["params"][name][part]
    np.testing.assert_allclose(linen.apply(variables, x), layer(x), atol=1e-6)


def test_softmax_equals_flax_itself():
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    own = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(nnx_layer("softmax")(x), own(x), atol=1e-6)


def test_options_reach_the_function():
    x = jax.random.normal(jax.random.key(0), (1, 10, 32))
    mean, total = nnx_layer("cumulant3"), nnx_layer("cumulant3", reduction="sum")
    bias = mean.out.bias[...]
    np.testing.assert_allclose(total(x) - bias, 10 * (mean(x) - bias), rtol=2e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"reductoin.*did you mean 'reduction'"):
        cj.as_flax_attention_fn("cumulant3", reductoin="sum")


@pytest.mark.parametrize(
    "precision", ["highest", jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2]
)
def test_precisions_that_flax_takes(precision):
    layer = nnx.MultiHeadAttention(
        num_heads=4,
        in_features=32,
        decode=False,
        attention_fn=cj.as_flax_attention_fn("cumulant3"),
        precision=precision,
        rngs=nnx.Rngs(0),
    )
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    np.testing.assert_allclose(layer(x), nnx_layer("cumulant3")(x), atol=1e-5)


def test_what_a_kind_cannot_do_is_refused():
    attention_fn = cj.as_flax_attention_fn("cumulant3")
    q = jnp.zeros((1, 4, 2, 8))
    for words, options in {
        "attention dropout": {"dropout_rate": 0.1, "deterministic": False},
        "bias": {"bias": jnp.zeros((1, 2, 4, 4))},
        "sown attention weights": {"module": object()},
        "depend on the query": {"mask": jnp.ones((1, 1, 4, 4))},
    }.items():
        with pytest.raises(ValueError, match=words):
            attention_fn(q, q, q, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_layers(kind):
    layer = nnx_layer(kind)
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    whole = layer(x, is_causal=True)
    np.testing.assert_allclose(whole[:, :4], layer(x[:, :4], is_causal=True), atol=1e-5)
