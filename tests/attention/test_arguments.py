"""Wrong arguments raise an error that names them, before any computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cumulant_jax as cj

Q = jnp.zeros((2, 6, 4, 8))
K = V = jnp.zeros((2, 9, 2, 8))
KINDS = ["softmax", "linear", "cumulant2", "cumulant3", "cumulant3_full", "cumulant4"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((Q[0, 0], K, V), ValueError, ["query", r"\(4, 8\)", "tokens, heads, dim"]),
        (([1.0], K, V), TypeError, ["query", "list"]),
        ((Q.astype(int), K, V), TypeError, ["query", "int32", "floating"]),
        ((Q, K[:1], V[:1]), ValueError, ["key", "batch", r"\(1, 9, 2, 8\)"]),
        ((Q, K[..., :4], V), ValueError, ["key", "dim", r"\(2, 9, 2, 4\)"]),
        ((Q, K, V[:, :5]), ValueError, ["value", r"\(2, 5, 2, 8\)"]),
        ((Q[:, :, :3], K, V), ValueError, ["heads", "multiple", "3 and 2"]),
        ((Q[:, :0], K, V), ValueError, ["query", "empty"]),
        ((Q, K[:, :0], V[:, :0]), ValueError, ["key", "empty"]),
        ((Q, K, V.astype(complex)), TypeError, ["value", "complex"]),
        ((Q, K.astype("float8_e4m3fn"), V), TypeError, ["key", "float8_e4m3fn", "bfloat16"]),
    ],
)
def test_wrong_arrays(kind, arguments, error, words):
    for word in words:
        with pytest.raises(error, match=word):
            cj.attention(kind, *arguments)
    if all(isinstance(x, jax.Array) for x in arguments):
        with pytest.raises(error, match=words[0]):
            jax.eval_shape(lambda *a: cj.attention(kind, *a), *arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mask": jnp.ones((2, 9))}, TypeError, ["mask", "boolean", "float32"]),
        ({"mask": "no"}, TypeError, ["mask", "str"]),
        ({"mask": jnp.ones((2, 8), bool)}, ValueError, ["mask", r"\(2, 8\)", r"\(2, 9\)"]),
        ({"mask": jnp.ones((2, 3, 1, 9), bool)}, ValueError, ["mask", r"\(2, 3, 1, 9\)"]),
        ({"key_value_seq_lengths": jnp.ones(2)}, TypeError, ["key_value_seq_lengths", "integers"]),
        ({"key_value_seq_lengths": jnp.ones(3, int)}, ValueError, ["key_value_seq_lengths", "3"]),
        ({"scale": "big"}, TypeError, ["scale", "big"]),
        ({"scale": jnp.ones(2)}, TypeError, ["scale"]),
        ({"implementation": "triton"}, ValueError, ["implementation", "triton", "mosaic_gpu"]),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, ["implementation", "xla"]),
        ({"is_causal": True}, ValueError, ["is_causal", "6 queries and 9 keys"]),
        ({"oder": 3}, TypeError, ["oder", "option"]),
        ({"scale": 10**400}, ValueError, ["scale", "finite"]),
        ({"scale": float("nan")}, ValueError, ["scale", "finite"]),
        ({"is_causal": "no"}, TypeError, ["is_causal", "True or False"]),
        ({"key_value_seq_lengths": "ab"}, TypeError, ["key_value_seq_lengths", "integers"]),
    ],
)
def test_wrong_options(kind, options, error, words):
    for word in words:
        with pytest.raises(error, match=word):
            cj.attention(kind, Q, K, V, **options)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "softmax"])
def test_a_mask_that_depends_on_the_query_is_refused_with_the_reason(kind):
    for mask in (jnp.ones((2, 4, 6, 9), bool), jnp.ones((6, 9), bool), jnp.ones((1, 6, 9), bool)):
        with pytest.raises(ValueError, match=r"must not depend on the query.*is_causal"):
            cj.attention(kind, Q, K, V, mask=mask)
        assert cj.attention("softmax", Q, K, V, mask=mask).shape == Q.shape


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "softmax"])
def test_wrong_states(kind):
    with pytest.raises(ValueError, match="is_causal=True"):
        cj.attention(kind, Q, Q, Q, return_state=True)
    with pytest.raises(TypeError, match="initial_state must be the MomentState"):
        cj.attention(kind, Q, Q, Q, is_causal=True, initial_state=(1, 2, 3))
    _, state = cj.attention(kind, Q, Q, Q, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match=r"initial_state.*same shapes.*sums"):
        cj.attention(kind, Q[:1], Q[:1], Q[:1], is_causal=True, initial_state=state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": 5}, ["order", "5", r"\(1, 2, 3, 4\)"]),
        ({"order": True}, ["order", "True"]),
        ({"order": 3.0}, ["order", "3.0"]),
        ({"order": jnp.array(3)}, ["order", "static under jit"]),
        ({"order": 4, "offdiagonal": True}, ["offdiagonal", "order=3"]),
        ({"reduction": "max"}, ["reduction", "max", "mean"]),
    ],
)
def test_wrong_cumulant_options(options, words):
    for word in words:
        with pytest.raises(ValueError, match=word):
            cj.cumulant_attention(Q, K, V, **options)
        with pytest.raises(ValueError, match=word):
            cj.attention_weights(Q, K, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"feature_map": "elu"}, ValueError, ["feature_map", "'elu'", "Known: elu1, exp, relu"]),
        ({"eps": 0.0}, ValueError, ["eps", "positive"]),
        ({"eps": "small"}, TypeError, ["eps"]),
        ({"feature_map": None}, TypeError, ["feature_map", "name or a function"]),
        ({"feature_map": lambda x: x[..., :1, :, :]}, ValueError, ["feature_map", "other axes"]),
        ({"feature_map": lambda x: x.sum(-1)}, ValueError, ["feature_map", "other axes"]),
    ],
)
def test_wrong_linear_options(options, error, words):
    for word in words:
        with pytest.raises(error, match=word):
            cj.linear_attention(Q, K, V, **options)


def test_unknown_kinds_name_the_nearest():
    for call in (
        lambda: cj.attention("cumulnat3", Q, K, V),
        lambda: cj.as_flax_attention_fn("cumulnat3"),
    ):
        with pytest.raises(ValueError, match="did you mean 'cumulant3'"):
            call()
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        cj.attention_weights(Q, K, kind="sofmax")
    with pytest.raises(ValueError, match="unknown attention kind"):
        cj.attention(["softmax"], Q, K, V)


def test_flags_must_be_flags():
    with pytest.raises(TypeError, match="offdiagonal must be True or False"):
        cj.cumulant_attention(Q, K, V, offdiagonal="no")
    with pytest.raises(TypeError, match="return_state must be True or False"):
        cj.cumulant_attention(Q, K, V, return_state="no")
    with pytest.raises(ValueError, match="eps must be positive"):
        cj.attention_weights(Q, K, kind="linear", eps=0.0)
    with pytest.raises(NotImplementedError, match=r"cudnn.*GPU"):
        cj.softmax_attention(Q, K, V, implementation="cudnn")


def test_lengths_beyond_the_tokens_mean_all():
    lengths = np.array([2**40, 9])
    whole = cj.cumulant_attention(Q, K, V, key_value_seq_lengths=lengths)
    np.testing.assert_array_equal(whole, cj.cumulant_attention(Q, K, V))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": jnp.ones(3)}, ValueError, ["temperature", r"\(4,\)", r"\(3,\)"]),
        ({"temperature": 1}, TypeError, ["temperature", "int"]),
        ({"temperature": "a"}, TypeError, ["temperature", "str"]),
        ({"temperature": 1.0, "mask": jnp.ones((2, 5), bool)}, ValueError, ["mask", r"\(2, 5\)"]),
        ({"temperature": 1.0, "seq_lengths": jnp.ones(2)}, TypeError, ["seq_lengths"]),
        ({"temperature": 1.0, "denominator_bias": Q}, ValueError, ["denominator_bias"]),
        ({"temperature": 1.0, "return_state": True}, ValueError, ["is_causal=True"]),
        (
            {"temperature": 1.0, "is_causal": True, "denominator_bias": jnp.ones((4, 5))},
            ValueError,
            ["denominator_bias", r"\(4, 6\)", r"\(4, 5\)"],
        ),
        (
            {"temperature": 1.0, "is_causal": True, "initial_state": 3},
            TypeError,
            ["initial_state", "TokenStatisticsState", "int"],
        ),
        ({"temperature": 1.0, "implementation": "mosaic_tpu"}, NotImplementedError, ["mosaic_tpu"]),
    ],
)
def test_wrong_token_statistics_arguments(options, error, words):
    for word in words:
        with pytest.raises(error, match=word):
            cj.token_statistics_attention(Q, **options)


def test_wrong_cross_covariance_arguments():
    with pytest.raises(ValueError, match="same tokens"):
        cj.cross_covariance_attention(Q, K, V, temperature=1.0)
    with pytest.raises(ValueError, match="value the dim of key"):
        cj.cross_covariance_attention(K, K, V[..., :4], temperature=1.0)
    with pytest.raises(ValueError, match="temperature"):
        cj.cross_covariance_attention(K, K, V, temperature=jnp.ones(5))
