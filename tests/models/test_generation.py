"""Generation against a loop over whole sequences, and the rules of sampling against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax import models
from cumulant_jax.models.generation import sample
from tests.models.random_models import apply, random_model

KINDS = [kind for kind in models.attention_kinds() if kind != "xca"]
VOCABULARY = 17
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW = 6


def small(**options):
    """A model that says many different things: its branches are as large as what they add to."""
    shape = {"vocab_size": VOCABULARY, "block_size": 16, "dim": 16, "depth": 2, "heads": 2}
    return random_model("gpt_nano", **{**shape, "layer_scale": None, **options})


def slow_greedy(model, prompt, count):
    """The whole sequence through the model for each token, without padding or state."""
    tokens = list(prompt)
    for _ in range(count):
        # One length for all calls, so that they are one program; causal: what follows is not seen.
        row = np.zeros((1, 12), int)
        row[0, : len(tokens)] = tokens
        tokens.append(int(apply(model, row)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_prompts_are_continued_as_each_alone(kind):
    model = small(attention=kind)
    tokens, mask = models.left_pad(PROMPTS)
    new = models.generate(model, tokens, mask=mask, max_new_tokens=NEW)
    assert new.dtype == jnp.int32
    for row, prompt in enumerate(PROMPTS):
        assert new[row].tolist() == slow_greedy(model, prompt, NEW), f"prompt {row}"
    assert len(np.unique(new)) > 3, "a model that says one thing would be easily imitated"


def test_what_stands_at_padding_does_not_matter():
    model = small(attention=["tssa", "softmax"])
    for pad_token in (0, 13):
        tokens, mask = models.left_pad(PROMPTS, pad_token=pad_token)
        new = models.generate(model, tokens, mask=mask, max_new_tokens=NEW)
        assert new[1].tolist() == slow_greedy(model, PROMPTS[1], NEW)


def test_in_bfloat16():
    model = small(attention=["tssa", "softmax"], dtype="bfloat16")
    new = models.generate(model, np.array([PROMPTS[0]]), max_new_tokens=NEW)
    assert ((new >= 0) & (new < VOCABULARY)).all()


def test_a_sequence_ends_with_eos():
    """Each row stops at its own end, and the end is what the row would have said anyway."""
    model = small(attention="tssa")
    tokens, mask = models.left_pad(PROMPTS)
    free = np.asarray(models.generate(model, tokens, mask=mask, max_new_tokens=NEW))
    eos = int(free[1, 1])
    ended = np.asarray(models.generate(model, tokens, mask=mask, max_new_tokens=NEW, eos=eos))
    for row in range(3):
        at = np.flatnonzero(free[row] == eos)
        length = at[0] + 1 if at.size else NEW
        np.testing.assert_array_equal(ended[row, :length], free[row, :length])
        assert (ended[row, length:] == eos).all()
    assert (free[1] != ended[1]).any(), "nothing came after the end"


def test_a_key_decides_the_draws():
    model, prompt = small(attention="cumulant3"), np.array([PROMPTS[0]] * 4)

    def draw(seed, **options):
        options = {"temperature": 1.0, "max_new_tokens": 5, **options}
        return np.asarray(models.generate(model, prompt, rng=jax.random.key(seed), **options))

    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()
    assert len({tuple(row) for row in draw(0)}) > 1, "rows draw for themselves"
    greedy = models.generate(model, prompt, max_new_tokens=5)
    np.testing.assert_array_equal(draw(0, top_k=1), greedy)
    np.testing.assert_array_equal(draw(0, top_p=1e-9), greedy)
    np.testing.assert_array_equal(draw(0, temperature=1e-6), greedy)


def kept(logits, temperature, top_k, top_p):
    """The probabilities after temperature, top-k and top-p, token by token in NumPy."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled)
    if top_k is not None:
        order = order[:top_k]
    probability = np.exp(scaled[order] - scaled[order].max())
    probability /= probability.sum()
    result, total = np.zeros(len(scaled)), 0.0
    for token, p in zip(order, probability, strict=True):
        if top_p is not None and total >= top_p:
            break
        result[token] = p
        total += p
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (2.0, 4, None),
        (1.0, None, 0.7),
        (1.5, 5, 0.8),
        (1.0, 12, 1.0),
    ],
)
@pytest.mark.parametrize("seed", [0])
def test_draws_have_the_right_frequencies(temperature, top_k, top_p, seed):
    logits = 1.5 * np.random.default_rng(seed).standard_normal(12)
    count = 20000
    draws = sample(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, 12)),
        jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    expected = kept(logits, temperature, top_k, top_p)
    frequency = np.bincount(draws, minlength=12) / count
    assert (frequency[expected == 0] == 0).all()
    # Five standard deviations of a binomial.
    bound = 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9
    assert (np.abs(frequency - expected) <= bound).all()


def test_the_prompt_may_fill_the_block():
    model = small()
    prompt = np.ones((1, 10), int)
    assert models.generate(model, prompt, max_new_tokens=6).shape == (1, 6)
    with pytest.raises(ValueError, match="capacity must be at most block_size = 16, got 17"):
        models.generate(model, prompt, max_new_tokens=7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, ValueError, "temperature must be at least 0"),
        ({"temperature": 1.0}, ValueError, "rng must be a key with a temperature above 0"),
        ({"temperature": 1.0, "rng": 0}, TypeError, "rng must be one JAX random key"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_k": 18}, ValueError, "top_k must be at most vocab_size = 17, got 18"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p must be above 0 and at most 1, got 1.1"),
        ({"eos": 1.5}, TypeError, "eos must be an integer"),
        ({"mask": np.ones((1, 3), bool)}, ValueError, "mask must be .*got shape"),
        ({"mask": np.array([[True, False]])}, ValueError, "padding stands on the left"),
    ],
    ids=str,
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        models.generate(small(), np.ones((1, 2), int), **{"max_new_tokens": 2, **options})


def test_only_a_language_model_generates(small):
    with pytest.raises(TypeError, match="model must be a LanguageModel, got ViT"):
        models.generate(small(), np.ones((1, 2), int), max_new_tokens=1)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_no_prompt_to_pad(prompts):
    with pytest.raises(ValueError, match="prompts must be one or more, of a token at least"):
        models.left_pad(prompts)
