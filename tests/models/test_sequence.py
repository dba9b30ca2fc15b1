"""The encoder for long sequences against NumPy, its padding, its pairs, its sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.models.layers.sequence_positions import sincos_1d
from tests.models.random_models import apply, by_path, loss_and_gradients, random_model

KINDS = models.attention_kinds()
TOKENS = {
    "vocab_size": 13,
    "max_tokens": 12,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "head_dim": 8,
    "mlp_ratio": 2.0,
    "qkv_bias": True,
    "pool": "mean",
}
NUMBERS = {**TOKENS, "vocab_size": None, "input_features": 3}


def small(**options):
    return random_model("lra_image", **{**TOKENS, **options})


def draw_inputs(seed=0, shape=(3, 10)):
    return np.random.default_rng(seed).integers(0, TOKENS["vocab_size"], shape)


# Against a second implementation
# ------------------------------------------------------------------------------------------------


def numpy_model(model, rows):
    """The model on sequences of any lengths, one at a time and without padding, in float64."""
    options = model.options
    arrays = {n: np.asarray(a, np.float64) for n, a in by_path(nnx.state(model)).items()}

    def linear(name, x):
        return x @ arrays[f"{name}.kernel"] + arrays.get(f"{name}.bias", 0.0)

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * arrays[f"{name}.scale"] + arrays[f"{name}.bias"]

    def attention(name, x):
        qkv = linear(f"{name}.qkv", x).reshape(len(x), 3, options.heads, -1)
        scores = np.einsum("thd,shd->hts", qkv[:, 0], qkv[:, 1]) / math.sqrt(qkv.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, qkv[:, 2]).reshape(len(x), -1)
        return linear(f"{name}.out", out)

    def mlp(name, x):
        h = linear(f"{name}.expand", x)
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return linear(f"{name}.contract", h)

    def encode(row):
        is_tokens = options.input_features is None
        x = arrays["embedding.table"][row] if is_tokens else linear("embedding.linear", row)
        if options.pool == "token":
            x = np.concatenate([arrays["class_token"][0], x])
        if options.position == "learned":
            x = x + arrays["positions.position_embedding"][: len(x)]
        elif options.position == "sincos":
            x = x + sincos_1d(len(x), options.dim)
        for i in range(options.depth):
            x = x + attention(f"blocks.{i}.attention", norm(f"blocks.{i}.norm1", x))
            x = x + mlp(f"blocks.{i}.mlp", norm(f"blocks.{i}.norm2", x))
        x = norm("norm", x)
        return x[0] if options.pool == "token" else x.mean(0)

    def classify(features):
        if options.head_dim is None:
            return linear("head", features)
        last = 2 if options.pairs else 1
        for i in range(last):
            features = np.maximum(linear(f"head.layers.{i}", features), 0)
        return linear(f"head.layers.{last}", features)

    if not options.pairs:
        return np.array([classify(encode(row)) for row in rows])
    out = []
    for first, second in rows:
        x, y = encode(first), encode(second)
        more = [x * y, x - y] if options.interaction == "nli" else []
        out.append(classify(np.concatenate([x, y, *more])))
    return np.array(out)


LENGTHS = np.array([10, 4, 1])


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "mean", "position": "sincos"},
        {"pool": "token", "position": "learned"},
        {"pool": "token", "position": "none", "head_dim": None, "qkv_bias": False},
        {**NUMBERS, "pool": "mean", "position": "learned"},
        {**NUMBERS, "pool": "token", "position": "sincos"},
    ],
    ids=str,
)
def test_padded_sequences_against_numpy(options, x64):
    model = small(dtype="float64", param_dtype="float64", **options)
    inputs = draw_inputs()
    if model.options.input_features:
        inputs = np.random.default_rng(0).standard_normal((3, 10, 3))
    expected = numpy_model(model, [x[:n] for x, n in zip(inputs, LENGTHS, strict=True)])
    by_length = apply(model, inputs, lengths=LENGTHS)
    np.testing.assert_allclose(by_length, expected, rtol=0, atol=1e-11)
    mask = np.arange(10) < LENGTHS[:, None]
    np.testing.assert_array_equal(apply(model, inputs, mask=mask), by_length)


@pytest.mark.parametrize("interaction", ["concat", "nli"])
@pytest.mark.parametrize("head_dim", [None, 8])
def test_pairs_against_numpy(interaction, head_dim, x64):
    types = {"dtype": "float64", "param_dtype": "float64"}
    model = small(pairs=True, interaction=interaction, head_dim=head_dim, **types)
    inputs = draw_inputs(shape=(2, 2, 10))
    lengths = np.array([[10, 3], [5, 7]])
    rows = [
        [x[:n] for x, n in zip(*pair, strict=True)] for pair in zip(inputs, lengths, strict=True)
    ]
    expected = numpy_model(model, rows)
    got = apply(model, inputs, lengths=lengths)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
    mask = np.arange(10) < lengths[..., None]
    np.testing.assert_array_equal(apply(model, inputs, mask=mask), got)


# Padding, for every kind
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pool"), [*((kind, "mean") for kind in KINDS), ("cumulant3", "token")]
)
def test_padding_changes_nothing(kind, pool):
    """Neither the logits nor a gradient, whatever stands there."""
    model = small(**{**NUMBERS, "attention": kind, "pool": pool, "depth": 1})
    row = np.random.default_rng(0).standard_normal((2, 7, 3)).astype(np.float32)
    padded = np.full((2, 10, 3), np.nan, np.float32)
    padded[:, :7] = row
    lengths = np.array([7, 7])

    def loss(model, *inputs, **arrays):
        return jnp.sum(jnp.sin(model(*inputs, **arrays)))

    expected, gradients = loss_and_gradients(model, lambda m: loss(m, row))
    actual, padded_gradients = loss_and_gradients(model, lambda m: loss(m, padded, lengths=lengths))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5)
    for name, gradient in padded_gradients.items():
        scale = max(1.0, np.abs(gradients[name]).max())
        np.testing.assert_allclose(
            gradient, gradients[name], rtol=0, atol=5e-5 * scale, err_msg=name
        )


def test_a_mask_may_have_holes():
    model = small(position="none", attention="cumulant3")
    inputs = draw_inputs(shape=(1, 10))
    keep = np.array([[True, False, True, True, False, False, True, False, True, True]])
    np.testing.assert_allclose(
        apply(model, inputs, mask=keep), apply(model, inputs[keep][None]), rtol=0, atol=2e-5
    )


def test_a_sequence_of_nothing_is_finite():
    for pool in ("mean", "token"):
        logits = apply(small(pool=pool), draw_inputs(), lengths=np.array([0, 10, 3]))
        assert np.isfinite(logits).all()


# Parts and sizes
# ------------------------------------------------------------------------------------------------


def test_intermediates():
    model = small(pool="token")
    inputs = jnp.asarray(draw_inputs())
    logits, inside = model(inputs, return_intermediates=True)
    assert set(inside) == {
        "embed",
        "pre_logits",
        "block_0",
        "block_1",
        "attention_0",
        "attention_1",
    }
    assert inside["embed"].shape == (3, 11, 16)
    np.testing.assert_allclose(model.norm(inside["block_1"])[:, 0], inside["pre_logits"], atol=1e-5)
    np.testing.assert_allclose(model.head(inside["pre_logits"]), logits, atol=1e-5)
    np.testing.assert_allclose(
        small(pool="token", num_classes=0)(inputs), inside["pre_logits"], rtol=0, atol=1e-5
    )
    pair = small(pairs=True, interaction="nli", num_classes=0)
    assert pair(jnp.asarray(draw_inputs(shape=(3, 2, 10)))).shape == (3, 64)


def test_pairs_are_encoded_each_by_itself():
    """Without a head, half of the features are those of the first sequence whatever the second."""
    model = small(pairs=True, num_classes=0)
    inputs = draw_inputs(shape=(2, 2, 10))
    other = inputs.copy()
    other[:, 1] = draw_inputs(seed=1, shape=(2, 10))
    before, after = apply(model, inputs), apply(model, other)
    np.testing.assert_allclose(before[:, :16], after[:, :16], rtol=0, atol=1e-5)
    assert np.abs(before[:, 16:] - after[:, 16:]).max() > 1e-3
    single = small(num_classes=0)
    np.testing.assert_allclose(before[:, :16], apply(single, inputs[:, 0]), rtol=0, atol=1e-5)


def test_sincos_positions_against_loops():
    table = sincos_1d(5, 6)
    for t in range(5):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert table[t, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[t, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)


# dim, depth, MLP and head features of the published baseline; the baseline's own counts were not
# published.
SIZES = {
    "lra_listops": (512, 6, 2048, 2048),
    "lra_text": (256, 4, 1024, 1024),
    "lra_retrieval": (128, 4, 512, 512),
    "lra_image": (32, 1, 64, 64),
    "lra_pathfinder": (128, 1, 128, 128),
}


def test_every_name_is_accounted_for():
    assert set(models.list_models("lra_*")) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_counts_in_closed_form(name):
    dim, depth, mlp, head = SIZES[name]
    shape = models.options(name)
    model = nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0)))
    token = shape["pool"] == "token"
    count = shape["vocab_size"] * dim + token * dim + 2 * dim
    count += (shape["max_tokens"] + token) * dim * (shape["position"] == "learned")
    count += depth * (4 * dim * dim + dim + 2 * dim * mlp + mlp + dim + 4 * dim)
    if shape["pairs"]:
        count += (2 * dim + 1) * head + (head + 1) * (head // 2) + (head // 2 + 1) * 2
    else:
        count += (dim + 1) * head + (head + 1) * shape["num_classes"]
    assert models.count_parameters(model) == count


@pytest.mark.parametrize("name", SIZES)
def test_the_example_of_the_options_goes_in(name):
    model = nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    call = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
    logits = jax.eval_shape(call, state, model.options.example)
    assert logits.shape == (1, model.options.num_classes)
    assert logits.dtype == jnp.float32
    assert models.summary(name, attention="tssa").tokens == model.options.tokens


@pytest.mark.parametrize("seed", [0])
def test_initialisation(seed):
    model = models.create("lra_text", max_tokens=64, rngs=nnx.Rngs(seed))
    assert np.std(model.embedding.table[...]) == pytest.approx(1.0, rel=0.03)
    assert np.abs(model.class_token[...]).max() < 1e-5
    cut = 0.02 * 0.8796
    assert np.std(model.blocks[0].attention.qkv.kernel[...]) == pytest.approx(cut, rel=0.03)


# Wrong arguments
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": None}, ValueError, "one of vocab_size .* and input_features"),
        ({"input_features": 3}, ValueError, "got vocab_size=13 and input_features=3"),
        ({"pool": "max"}, ValueError, "unknown pool 'max'"),
        ({"interaction": "nil"}, ValueError, "unknown interaction 'nil'; did you mean 'nli'"),
        ({"position": "sin"}, ValueError, "unknown position 'sin'"),
        ({"position": "sincos", "dim": 15, "heads": 3}, ValueError, "dim must be even"),
        ({"pairs": "yes"}, TypeError, "pairs must be True or False"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
    ],
    ids=str,
)
def test_impossible_options(options, error, message):
    with pytest.raises(error, match=message):
        models.SequenceEncoderOptions(**{**TOKENS, **options})


@pytest.mark.parametrize(
    ("options", "inputs", "arrays", "error", "message"),
    [
        ({}, [1], {}, TypeError, "inputs must be an array, got list"),
        (
            {},
            np.zeros((2, 13), int),
            {},
            ValueError,
            r"inputs must be \[batch, tokens\] with 1 to 12",
        ),
        ({}, np.zeros((2, 0), int), {}, ValueError, "with 1 to 12 tokens"),
        ({}, np.zeros((2, 3)), {}, TypeError, "inputs must be integers, got float64"),
        ({"pairs": True}, np.zeros((2, 3), int), {}, ValueError, r"\[batch, 2, tokens\]"),
        (NUMBERS, np.zeros((2, 4, 2)), {}, ValueError, r"\[batch, tokens, 3\]"),
        (NUMBERS, np.zeros((2, 4, 3), int), {}, TypeError, "inputs must be floats, got int64"),
        ({}, np.zeros((2, 3), int), {"mask": np.ones(3, bool)}, ValueError, "mask must be"),
        ({}, np.zeros((2, 3), int), {"lengths": np.ones(3, int)}, ValueError, "lengths must be"),
        ({}, np.zeros((2, 3), int), {"lengths": np.ones(2)}, TypeError, "lengths must be integers"),
        (
            {},
            np.zeros((2, 3), int),
            {"lengths": np.ones(2, int), "mask": np.ones((2, 3), bool)},
            ValueError,
            "mask and lengths say the same thing",
        ),
    ],
)
def test_wrong_inputs(options, inputs, arrays, error, message):
    with pytest.raises(error, match=message):
        small(**options)(inputs, **arrays)


def test_options_may_be_replaced():
    record = models.SequenceEncoderOptions(**NUMBERS)
    assert dataclasses.replace(record) == record
