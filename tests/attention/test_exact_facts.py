"""Facts that hold exactly, whatever the implementation: the mathematics of the expansion."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import cumulant_jax as cj
from tests.attention.checks import assert_close
from tests.attention.subjects import SUBJECTS, Shape, make_inputs

CUMULANTS = [k for k in SUBJECTS if k.startswith("cumulant")]
SHAPE = Shape(batch=(2,), queries=6, keys=9, heads=2, key_heads=1, dim=5, value_dim=3)


def qkv(shape=SHAPE, seed=0, dtype=jnp.float64):
    inputs = make_inputs(SUBJECTS["softmax"], shape, seed=seed, dtype=dtype)
    return inputs["query"], inputs["key"], inputs["value"]


def softmax_taylor_terms(query, key, value, order):
    """The terms of t ↦ softmax attention(t q, k, v) at t = 0, by Taylor-mode differentiation."""

    def along(t):
        groups = query.shape[-2] // key.shape[-2]
        keys, values = jnp.repeat(key, groups, -2), jnp.repeat(value, groups, -2)
        logits = t * jnp.einsum("bthd,bshd->bhts", query, keys) * query.shape[-1] ** -0.5
        weights = jnp.exp(logits)
        weights = weights / weights.sum(-1, keepdims=True)
        return jnp.einsum("bhts,bshd->bthd", weights, values)

    series = [jnp.ones(())] + [jnp.zeros(())] * (order - 1)
    value_at_0, derivatives = jet.jet(along, (jnp.zeros(()),), (series,))
    factorials = np.cumprod(np.arange(1, order + 1))
    return [value_at_0, *(d / f for d, f in zip(derivatives, factorials, strict=True))]


def test_order_3_full_is_the_second_order_taylor_polynomial(x64):
    query, key, value = qkv()
    terms = softmax_taylor_terms(query, key, value, 2)
    full = cj.cumulant_attention(query, key, value, order=3, offdiagonal=True)
    assert_close(full, sum(terms), what="order 3 full")
    second = cj.cumulant_attention(query, key, value, order=2)
    assert_close(second, terms[0] + terms[1], what="order 2")
    assert_close(cj.cumulant_attention(query, key, value, order=1), terms[0], what="order 1")
    assert_close(full - second, terms[2], what="the third cumulant")


@pytest.mark.parametrize("order", [2, 3, 4])
def test_in_one_dimension_orders_are_the_taylor_polynomials(order, x64):
    query, key, value = qkv(Shape(queries=6, keys=9, dim=1, value_dim=3))
    terms = softmax_taylor_terms(query, key, value, order - 1)
    actual = cj.cumulant_attention(query, key, value, order=order)
    assert_close(actual, sum(terms), what=f"order {order}")


@pytest.mark.parametrize("kind", CUMULANTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shifting_keys_changes_nothing_and_shifting_values_shifts(kind, reduction, x64):
    query, key, value = qkv()
    factor = key.shape[-3] if reduction == "sum" else 1
    before = cj.attention(kind, query, key, value, reduction=reduction)
    shifted_keys = cj.attention(kind, query, key + 7.0, value, reduction=reduction)
    assert_close(shifted_keys, before, what="shifted keys", tolerance=1e-10)
    shifted_values = cj.attention(kind, query, key, value + 2.5, reduction=reduction)
    assert_close(shifted_values, before + 2.5 * factor, what="shifted values", tolerance=1e-10)


@pytest.mark.parametrize("kind", CUMULANTS)
def test_the_sum_form_is_the_mean_form_times_the_tokens(kind, x64):
    query, key, value = qkv()
    lengths = jnp.array([9, 4])
    mean = cj.attention(kind, query, key, value, key_value_seq_lengths=lengths)
    total = cj.attention(kind, query, key, value, key_value_seq_lengths=lengths, reduction="sum")
    assert_close(total, mean * lengths[:, None, None, None], what="sum form")


@pytest.mark.parametrize(
    ("options", "slope"), [({"order": 2}, 2), ({"order": 3, "offdiagonal": True}, 3)]
)
def test_the_error_falls_with_the_power_of_the_query(options, slope, x64):
    query, key, value = qkv()

    def error(t):
        exact = cj.softmax_attention(t * query, key, value)
        return float(jnp.abs(cj.cumulant_attention(t * query, key, value, **options) - exact).max())

    observed = np.log2(error(2e-3) / error(1e-3))
    assert abs(observed - slope) < 0.02


@pytest.mark.parametrize("kind", [*CUMULANTS, "linear", "softmax"])
def test_linear_in_the_values(kind, x64):
    query, key, value = qkv()
    other = qkv(seed=1)[2]
    mixed = cj.attention(kind, query, key, 2 * value - 3 * other)
    parts = [cj.attention(kind, query, key, v) for v in (value, other)]
    assert_close(mixed, 2 * parts[0] - 3 * parts[1], what="mixture", tolerance=1e-11)


@pytest.mark.parametrize("kind", [*CUMULANTS, "linear", "softmax"])
def test_the_order_of_the_keys_does_not_matter(kind, x64):
    query, key, value = qkv()
    order = np.random.default_rng(0).permutation(key.shape[-3])
    permuted = cj.attention(kind, query, key[:, order], value[:, order])
    assert_close(permuted, cj.attention(kind, query, key, value), what="permuted")


@pytest.mark.parametrize("kind", [*CUMULANTS, "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_key_gives_its_value(kind, dtype):
    shape = Shape(queries=4, keys=1, heads=2, key_heads=2, dim=8, value_dim=8)
    inputs = make_inputs(SUBJECTS[kind], shape, seed=0, dtype=dtype)
    out = SUBJECTS[kind].call(inputs)
    np.testing.assert_array_equal(out, jnp.broadcast_to(inputs["value"], out.shape))


WEIGHTS = {
    "softmax": {"kind": "softmax"},
    "linear": {"kind": "linear"},
    "cumulant2": {"order": 2},
    "cumulant3": {"order": 3},
    "cumulant3_full": {"order": 3, "offdiagonal": True},
    "cumulant4": {"order": 4},
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_times_values_are_the_output(kind, x64):
    query, key, value = qkv()
    mask = np.random.default_rng(0).random((2, 9)) < 0.7
    weights = cj.attention_weights(query, key, mask=mask, **WEIGHTS[kind])
    assert weights.shape == (2, 2, 6, 9)
    values = jnp.repeat(value, 2, axis=-2)
    out = jnp.einsum("bhts,bshd->bthd", weights, values)
    assert_close(out, cj.attention(kind, query, key, value, mask=mask), what=kind)
    assert not np.asarray(weights)[~np.broadcast_to(mask[:, None, None], weights.shape)].any()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6 if kind == "linear" else 1e-12)


def test_effective_weights_may_be_negative_and_sum_to_the_tokens():
    query, key, _ = qkv(dtype=jnp.float32)
    weights = cj.attention_weights(3 * query, key, order=2, reduction="sum")
    assert weights.min() < 0
    np.testing.assert_allclose(weights.sum(-1), 9, rtol=1e-5)


def test_weights_of_an_empty_row_are_zero():
    query, key, _ = qkv(dtype=jnp.float32)
    for kind in WEIGHTS.values():
        weights = cj.attention_weights(query, key, key_value_seq_lengths=jnp.array([9, 0]), **kind)
        assert np.isfinite(weights).all()
        assert not np.asarray(weights[1]).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_softmax_never_looks_ahead(is_causal):
    query, key, value = qkv(Shape(queries=9, keys=9, dim=5, value_dim=3), dtype=jnp.float32)
    before = cj.softmax_attention(query, key, value, is_causal=is_causal)
    changed = cj.softmax_attention(
        query, key.at[:, 5:].add(1.0), value.at[:, 5:].add(1.0), is_causal=is_causal
    )
    same = np.array_equal(np.asarray(before[:, :5]), np.asarray(changed[:, :5]))
    assert same == is_causal


def test_memberships_sum_to_one_over_heads():
    w = make_inputs(SUBJECTS["token_statistics"], SHAPE, seed=0)["w"]
    membership, moment = cj.token_memberships(w, temperature=1.0, seq_lengths=jnp.array([9, 4]))
    np.testing.assert_allclose(membership[0].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(membership[1].sum(-1), [1] * 4 + [0] * 5, rtol=1e-6)
    out = cj.token_statistics_attention(w, temperature=1.0, seq_lengths=jnp.array([9, 4]))
    expected = -w * membership[..., None] / (1 + moment[:, None])
    np.testing.assert_allclose(out, expected, rtol=1e-6)
