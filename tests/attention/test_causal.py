"""Causal attention in linear time: each token's output is that of the tokens up to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cumulant_jax as cj
from cumulant_jax.kernels.causal import CHUNK
from tests.attention.checks import assert_close
from tests.attention.subjects import SUBJECTS, Shape, make_inputs

KINDS = ("linear", "cumulant2", "cumulant3", "cumulant3_full", "cumulant4")
TOKENS = CHUNK + 29  # two chunks, the second not full
SHAPE = Shape(batch=(2,), queries=TOKENS, keys=TOKENS, heads=4, key_heads=2, dim=6, value_dim=5)
causal_kinds = pytest.mark.parametrize("kind", [*KINDS, "softmax"])
linear_kinds = pytest.mark.parametrize("kind", KINDS)


def dense(kind, inputs, mask=None):
    """The plain form on the tokens up to each one, token by token."""
    tokens = inputs["query"].shape[-3]

    def at(t):
        up_to = (jnp.arange(tokens) <= t)[None, None, None]
        if mask is not None:
            up_to = up_to & mask[:, None, None]
        query = jax.lax.dynamic_slice_in_dim(inputs["query"], t, 1, -3)
        return SUBJECTS[kind].reference(jnp, query, inputs["key"], inputs["value"], mask=up_to)

    return jnp.moveaxis(jax.vmap(at)(jnp.arange(tokens))[..., 0, :, :], 0, -3)


def outputs_and_gradients(function, inputs):
    @jax.jit
    def run(inputs):
        out, pull_back = jax.vjp(function, inputs)
        return out, pull_back(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    return run(inputs)


def compare(actual, expected, *, tolerance):
    assert_close(actual[0], expected[0], what="output", tolerance=tolerance)
    for name, gradient in actual[1].items():
        assert_close(gradient, expected[1][name], what=f"gradient of {name}", tolerance=tolerance)


@causal_kinds
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_gradients(kind, masked, x64):
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0, dtype=jnp.float64)
    mask = None
    if masked:  # left padding, longer than a chunk for one row, and holes
        mask = np.arange(TOKENS) >= np.array([CHUNK + 3, 2])[:, None]
        mask = jnp.asarray(mask & (np.random.default_rng(0).random((2, TOKENS)) < 0.8))

    def call(i):
        return SUBJECTS[kind].call(i, mask=mask, is_causal=True)

    expected = outputs_and_gradients(functools.partial(dense, kind, mask=mask), inputs)
    compare(outputs_and_gradients(call, inputs), expected, tolerance=1e-11)
    if masked:
        poisoned = dict(inputs)
        for name in ("key", "value"):
            poisoned[name] = jnp.where(mask[..., None, None], inputs[name], jnp.nan)
        compare(outputs_and_gradients(call, poisoned), expected, tolerance=1e-11)


@causal_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision(kind, dtype):
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0, dtype=dtype)
    out = SUBJECTS[kind].call(inputs, is_causal=True)
    assert out.dtype == dtype
    with jax.enable_x64(True):
        exact = dense(kind, {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in inputs.items()})
    assert_close(out, exact, what="output", tolerance=5e-5 if dtype == "float32" else 2e-2)


@linear_kinds
@pytest.mark.parametrize("split", [1, 40, CHUNK, CHUNK + 28])
def test_split_and_resume_equals_one_run(kind, split, x64):
    """Two calls with the carried state equal one, gradients through the state too."""
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0, dtype=jnp.float64)

    def whole(i):
        return SUBJECTS[kind].call(i, is_causal=True)

    def in_two(i):
        first = {n: x[:, :split] for n, x in i.items()}
        second = {n: x[:, split:] for n, x in i.items()}
        out, state = SUBJECTS[kind].call(first, is_causal=True, return_state=True)
        rest = SUBJECTS[kind].call(second, is_causal=True, initial_state=state)
        return jnp.concatenate([out, rest], axis=1)

    actual = outputs_and_gradients(in_two, inputs)
    compare(actual, outputs_and_gradients(whole, inputs), tolerance=1e-10)


@linear_kinds
def test_decoding_token_by_token(kind):
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0)
    expected = SUBJECTS[kind].call(inputs, is_causal=True)
    prompt = {n: x[:, :20] for n, x in inputs.items()}
    _, state = SUBJECTS[kind].call(prompt, is_causal=True, return_state=True)

    @jax.jit
    def decode(state, inputs):
        def step(state, token):
            token = {n: x[:, None] for n, x in token.items()}
            out, state = SUBJECTS[kind].call(
                token, is_causal=True, initial_state=state, return_state=True
            )
            return state, out[:, 0]

        rest = {n: jnp.moveaxis(x[:, 20:], 1, 0) for n, x in inputs.items()}
        return jnp.moveaxis(jax.lax.scan(step, state, rest)[1], 0, 1)

    assert_close(decode(state, inputs), expected[:, 20:], what="decoded", tolerance=5e-5)


@causal_kinds
def test_later_tokens_change_nothing_before_them(kind):
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0)
    before = SUBJECTS[kind].call(inputs, is_causal=True)
    for at in (1, 100, CHUNK, TOKENS - 1):
        changed = {n: x.at[:, at:].multiply(-2.0) for n, x in inputs.items()}
        after = SUBJECTS[kind].call(changed, is_causal=True)
        assert_close(after[:, :at], before[:, :at], what=f"before {at}", tolerance=2e-6)
        assert jnp.abs(after[:, at:] - before[:, at:]).max() > 0.01


@pytest.mark.parametrize("kind", KINDS[1:])
def test_large_means_and_an_outlier_first_token(kind):
    inputs = make_inputs(SUBJECTS[kind], SHAPE, seed=0)
    inputs["key"] = (inputs["key"] + 1000.0).at[:, 0].multiply(1.05)
    with jax.enable_x64(True):
        exact = dense(kind, {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in inputs.items()})
    late = exact[:, 30:]
    out = SUBJECTS[kind].call(inputs, is_causal=True)[:, 30:]
    assert_close(out, late, what="output", tolerance=2e-3 if kind == "cumulant4" else 2e-4)


@linear_kinds
def test_no_quadratic_array(kind):
    tokens = 1009
    shape = Shape(batch=(), queries=tokens, keys=tokens, heads=1, key_heads=1)
    inputs = make_inputs(SUBJECTS[kind], shape, seed=0)
    gradient = jax.grad(lambda i: jnp.sum(SUBJECTS[kind].call(i, is_causal=True)))
    jaxpr = str(jax.make_jaxpr(gradient)(inputs))
    assert f"{tokens}," in jaxpr
    assert f"{tokens},{tokens}" not in jaxpr
    assert str(tokens * tokens) not in jaxpr


class TestTokenStatistics:
    """The causal form of token statistics."""

    def inputs(self, dtype=jnp.float64):
        inputs = make_inputs(SUBJECTS["token_statistics"], SHAPE, seed=0, dtype=dtype)
        bias = np.random.default_rng(1).standard_normal((SHAPE.heads, TOKENS))
        return {**inputs, "bias": jnp.asarray(0.1 * bias, dtype)}

    @staticmethod
    def call(i, state=None, **options):
        return cj.token_statistics_attention(
            i["w"],
            temperature=i["temperature"],
            denominator_bias=i["bias"],
            is_causal=True,
            initial_state=state,
            **options,
        )

    def test_split_and_resume_equals_one_run(self, x64):
        def in_two(i):
            first = {**i, "w": i["w"][:, :70], "bias": i["bias"][:, :70]}
            second = {**i, "w": i["w"][:, 70:], "bias": i["bias"][:, 70:]}
            out, state = self.call(first, return_state=True)
            return jnp.concatenate([out, self.call(second, state)], axis=1)

        inputs = self.inputs()
        actual = outputs_and_gradients(in_two, inputs)
        compare(actual, outputs_and_gradients(self.call, inputs), tolerance=1e-11)

    def test_decoding_token_by_token(self):
        inputs = self.inputs(jnp.float32)
        expected, state = self.call(inputs), None
        for t in range(5):
            token = {**inputs, "w": inputs["w"][:, t : t + 1], "bias": inputs["bias"][:, t : t + 1]}
            out, state = self.call(token, state, return_state=True)
            assert_close(out[:, 0], expected[:, t], what=f"token {t}", tolerance=1e-5)

    def test_later_tokens_change_nothing_before_them(self):
        inputs = self.inputs(jnp.float32)
        changed = {**inputs, "w": inputs["w"].at[:, 50:].multiply(-2.0)}
        before, after = self.call(inputs), self.call(changed)
        np.testing.assert_array_equal(after[:, :50], before[:, :50])
        assert jnp.abs(after[:, 50:] - before[:, 50:]).max() > 0.01

    def test_masked_tokens_change_nothing(self, x64):
        inputs = self.inputs()
        keep = np.random.default_rng(0).random((2, TOKENS)) < 0.7
        keep[1] = keep[0]
        mask = jnp.asarray(keep)
        poisoned = {**inputs, "w": jnp.where(mask[..., None, None], inputs["w"], jnp.nan)}
        out = self.call(poisoned, mask=mask)
        short = {**inputs, "w": inputs["w"][:, keep[0]], "bias": inputs["bias"][:, keep[0]]}
        assert_close(out[:, keep[0]], self.call(short), what="unmasked tokens")
        assert not np.asarray(out)[~keep].any()


def test_token_statistics_with_a_bias_of_its_own_for_each_row(x64):
    """Rows of different biases equal each row alone with its bias."""
    w, bias = np.random.default_rng(0).standard_normal((2, 3, 9, 4, 4))
    bias = bias[:, :, :, 0].transpose(0, 2, 1)
    together = cj.token_statistics_attention(
        jnp.asarray(w), temperature=0.7, is_causal=True, denominator_bias=jnp.asarray(bias)
    )
    for row in range(3):
        alone = cj.token_statistics_attention(
            jnp.asarray(w[row]),
            temperature=0.7,
            is_causal=True,
            denominator_bias=jnp.asarray(bias[row]),
        )
        assert_close(together[row], alone, what=f"row {row}", tolerance=1e-13)
