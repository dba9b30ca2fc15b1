"""The causal language model against the published one, and what causality and padding promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.models.layers.attention import TSSAttention
from tests.models.random_models import apply, by_path, extend, loss_and_gradients, random_model

CAUSAL_KINDS = [kind for kind in models.attention_kinds() if kind != "xca"]
SMALL = {"vocab_size": 17, "block_size": 24, "dim": 16, "depth": 2, "heads": 2}
every_causal_kind = pytest.mark.parametrize("kind", CAUSAL_KINDS)
# One of each way to be causal; the others are alike.
few_causal_kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=() if kind in ("softmax", "cumulant3", "tssa") else pytest.mark.slow
        )
        for kind in CAUSAL_KINDS
    ],
)


def small(**options):
    return random_model("gpt_nano", **{**SMALL, **options})


def draw_tokens(seed=0, shape=(2, 12)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL["vocab_size"], shape))


def next_token_loss(logits, targets):
    """Mean cross-entropy over the targets that are not -1."""
    log_probability = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probability, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(targets < 0, 0, chosen)) / jnp.sum(targets >= 0)


# The published model
# ------------------------------------------------------------------------------------------------

NAMES = [
    ("transformer.wte.weight", "token_embedding"),
    ("transformer.wpe.weight", "positions.position_embedding"),
    ("transformer.h.", "blocks."),
    ("transformer.ln_f.weight", "norm.scale"),
    (".gamma1", ".layer_scale1.gamma"),
    (".gamma2", ".layer_scale2.gamma"),
    (".ln_1.weight", ".norm1.scale"),
    (".ln_2.weight", ".norm2.scale"),
    (".attn.temp", ".attention.temperature"),
    (".attn.denom_bias", ".attention.denominator_bias"),
    (".attn.c_attn.weight", ".attention.qkv.kernel"),
    (".attn.c_proj.weight", ".attention.out.kernel"),
    (".mlp.c_fc.weight", ".mlp.expand.kernel"),
    (".mlp.c_proj.weight", ".mlp.contract.kernel"),
]


def published(arrays, prefix):
    """The arrays "prefix/..." of the published model under our names and in our layouts."""
    ours = {}
    for key, value in arrays.items():
        if not key.startswith(prefix) or "lm_head" in key:  # tied to wte
            continue
        name = key.removeprefix(prefix)
        for theirs, new in NAMES:
            name = name.replace(theirs, new)
        if name.endswith(("temperature", "denominator_bias")):
            value = value[..., 0]
        ours[name] = value.T if name.endswith("kernel") else value
    return ours


def published_model(arrays, set_params, **options):
    model = models.create(
        "tost_lm_base",
        vocab_size=96,
        block_size=32,
        depth=2,
        heads=4,
        dim=48,
        rngs=nnx.Rngs(0),
        **options,
    )
    set_params(model, published(arrays, "sd/"))
    return model


@pytest.fixture
def arrays(golden):
    return dict(np.load(golden / "gpt_tssa_tiny.npz"))


@pytest.mark.parametrize("remat", [False, True])
def test_published_logits_loss_and_every_gradient(remat, arrays, set_params):
    model = published_model(arrays, set_params, remat=remat)
    tokens, targets = jnp.asarray(arrays["idx"]), jnp.asarray(arrays["targets"])
    np.testing.assert_allclose(apply(model, tokens), arrays["logits"], rtol=0, atol=2e-5)
    value, gradients = loss_and_gradients(model, lambda m: next_token_loss(m(tokens), targets))
    np.testing.assert_allclose(value, arrays["loss"], rtol=0, atol=2e-6)
    expected = published(arrays, "grad/")
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        scale = max(1.0, np.abs(expected[name]).max())
        np.testing.assert_allclose(
            gradient, expected[name], rtol=0, atol=2e-5 * scale, err_msg=name
        )


def test_published_logits_of_the_last_token(arrays, set_params):
    model = published_model(arrays, set_params)
    tokens = jnp.asarray(arrays["idx"])
    logits, state = extend(model, tokens, model.start(2, 24))
    np.testing.assert_allclose(logits, arrays["logits_last"][:, 0], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(state.length, 24)


def test_published_greedy_decoding(arrays, set_params):
    model = published_model(arrays, set_params)
    new = models.generate(model, arrays["idx"][:, :4], max_new_tokens=12)
    np.testing.assert_array_equal(new, arrays["greedy"][:, 4:])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("", "float32"),
        *((case, "float64") for case in ("", "edge_n1/", "edge_zero/", "edge_big/")),
    ],
)
def test_published_causal_layer(case, dtype, golden, x64):
    """Output and every gradient of the layer, and the same token by token."""
    arrays = dict(np.load(golden / "tssa_causal.npz"))
    types = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    layer = TSSAttention(
        dim=64, heads=4, qkv_bias=False, out_bias=False, max_tokens=32, rngs=nnx.Rngs(0), **types
    )
    names = {
        "temp": "temperature",
        "denom_bias": "denominator_bias",
        "c_attn.weight": "qkv.kernel",
        "c_proj.weight": "out.kernel",
    }
    reshape = {
        "temp": np.ravel,
        "denom_bias": lambda a: a[..., 0],
        "c_attn.weight": np.transpose,
        "c_proj.weight": np.transpose,
    }
    for theirs, ours in names.items():
        target = layer
        for part in ours.split("."):
            target = getattr(target, part)
        target[...] = jnp.asarray(reshape[theirs](arrays[f"param/{theirs}"]), dtype)
    suffix, tolerance = ("_f64", 1e-10) if dtype == "float64" else ("", 2e-5)
    x = jnp.asarray(arrays[f"{case}x"], dtype)
    cotangent = jnp.asarray(arrays[f"{case}cotangent"], dtype)
    _, gradients = loss_and_gradients(layer, lambda m: jnp.sum(m(x, is_causal=True) * cotangent))
    actual = {"out": jax.jit(lambda m, x: m(x, is_causal=True))(layer, x)}
    actual |= {f"grad/{n}": gradients[ours] for n, ours in names.items()}
    for name, value in actual.items():
        expected = arrays[f"{case}{name}{suffix}"]
        expected = reshape.get(name.removeprefix("grad/"), np.asarray)(expected)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance * scale, err_msg=name)
    state, steps = layer.start(len(x), 32), []
    for t in range(x.shape[1]):
        position = jnp.full((len(x), 1), t)
        out, state = extend(layer, x[:, t : t + 1], state, positions=position)
        steps.append(out)
    expected = arrays[f"{case}out{suffix}"]
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, rtol=0, atol=tolerance * scale)


# Causality, padding, decoding
# ------------------------------------------------------------------------------------------------


@every_causal_kind
@pytest.mark.parametrize("changed", [5])
def test_a_token_changes_nothing_before_it(kind, changed):
    model = small(attention=kind)
    tokens = draw_tokens()
    other = tokens.at[:, changed].set((tokens[:, changed] + 1) % SMALL["vocab_size"])
    before, after = apply(model, tokens), apply(model, other)
    np.testing.assert_allclose(before[:, :changed], after[:, :changed], rtol=0, atol=1e-5)
    assert np.abs(before[:, changed:] - after[:, changed:]).max(axis=(0, 2)).min() > 1e-3


@few_causal_kinds
def test_no_gradient_flows_back_from_the_future(kind):
    """The derivative of each output by each position embedding is zero above the diagonal."""
    model = small(attention=kind, depth=1)
    graphdef, state = nnx.split(model)
    tokens = draw_tokens(shape=(1, 6))
    weights = jax.random.normal(jax.random.key(0), (SMALL["vocab_size"],))
    outputs = jax.jit(jax.jacrev(lambda state: nnx.merge(graphdef, state)(tokens)[0] @ weights))
    jacobian = by_path(outputs(state))["positions.position_embedding"][:, :6]
    influence = np.abs(jacobian).max(axis=-1)
    assert (influence[np.triu_indices(6, 1)] == 0).all()
    assert (influence[np.tril_indices(6)] > 0).all()


@every_causal_kind
def test_part_by_part_equals_all_at_once(kind):
    """A part of five tokens, then token by token, as a prompt and what is generated."""
    model = small(attention=kind)
    tokens = draw_tokens()
    expected = apply(model, tokens)
    logits, state = extend(model, tokens[:, :5], model.start(2, 12))
    for t in range(5, 12):
        np.testing.assert_allclose(logits, expected[:, t - 1], rtol=0, atol=5e-5, err_msg=str(t))
        logits, state = extend(model, tokens[:, t : t + 1], state)
    np.testing.assert_array_equal(state.length, 12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("softmax", {"scale": 1.5}), ("cumulant3", {"reduction": "sum"}), ("mssa", {"scale": 0.2})],
)
def test_options_of_the_layers_hold_token_by_token(kind, options):
    more = {} if kind == "mssa" else {"qk_norm": "rms", "query_scale": 2.0}
    model = small(attention=kind, attention_options=options, **more)
    tokens = draw_tokens(shape=(2, 4))
    expected = apply(model, tokens)
    assert np.abs(expected - apply(small(attention=kind, **more), tokens)).max() > 1e-3
    state = model.start(2, 4)
    for t in range(4):
        logits, state = extend(model, tokens[:, t : t + 1], state)
        np.testing.assert_allclose(logits, expected[:, t], rtol=0, atol=1e-4, err_msg=str(t))


def test_a_summary_counts_the_whole_block():
    summary = models.summary("tost_lm_nano", vocab_size=100, block_size=32)
    assert (summary.tokens, summary.input_shape) == (32, (32,))
    # Two projections and the MLP of each block, and the tied map to logits.
    products = 3 * 32 * (2 + 8) * 64 * 64 + 32 * 64 * 100
    assert summary.macs == products


@pytest.mark.parametrize(
    ("kind", "position"),
    [*((kind, "learned") for kind in CAUSAL_KINDS), ("tssa", "sincos"), ("tssa", "none")],
)
def test_padding_changes_nothing(kind, position):
    """A row with padding, on the left, on the right or between, equals the row without."""
    model = small(attention=kind, position=position)
    row = draw_tokens(shape=(1, 7))
    expected = apply(model, row)[0]
    mask = np.ones((3, 10), bool)
    mask[0, :3] = mask[1, 7:] = mask[2, [0, 4, 8]] = False
    tokens = np.array(draw_tokens(seed=1, shape=(3, 10)))
    for r in range(3):
        tokens[r, mask[r]] = row[0]
    logits = apply(model, tokens, mask=mask)
    for r in range(3):
        np.testing.assert_allclose(
            logits[r][mask[r]], expected, rtol=0, atol=5e-5, err_msg=f"row {r}"
        )
    logits, state = extend(model, tokens[:1], model.start(1, 10), mask=mask[:1])
    np.testing.assert_allclose(logits[0], expected[-1], rtol=0, atol=5e-5)
    np.testing.assert_array_equal(state.length, [7])


@few_causal_kinds
def test_padding_changes_no_gradient(kind):
    model = small(attention=kind, depth=1)
    row = draw_tokens(shape=(1, 7))
    padded = jnp.concatenate([draw_tokens(seed=1, shape=(1, 3)), row], axis=1)
    mask = jnp.arange(10)[None] >= 3
    _, expected = loss_and_gradients(model, lambda m: jnp.sin(m(row)).sum())
    _, actual = loss_and_gradients(model, lambda m: jnp.sin(m(padded, mask=mask))[:, 3:].sum())
    for name, gradient in actual.items():
        scale = max(1.0, np.abs(expected[name]).max())
        np.testing.assert_allclose(
            gradient, expected[name], rtol=0, atol=5e-5 * scale, err_msg=name
        )


@pytest.mark.parametrize("kind", ["linear", "cumulant3", "tssa"])
def test_the_state_of_a_linear_kind_does_not_grow(kind):
    model = small(attention=kind)
    sizes = []
    for tokens, capacity in ((3, 4), (20, 24)):
        _, state = jax.eval_shape(
            model.extend, draw_tokens(shape=(2, tokens)), model.start(2, capacity)
        )
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
    assert sizes[0] == sizes[1]
    if kind == "tssa":  # 2 dim + heads numbers per block and sequence, and the length
        assert sizes[0] == 2 * (2 * (2 * 16 + 2) + 1)


# The skeleton
# ------------------------------------------------------------------------------------------------

# Published in millions, without the position embedding.
PUBLISHED_MILLIONS = {
    "tost_lm_base": 109.60,
    "tost_lm_medium": 303.66,
    "tost_lm_large": 655.14,
}


def abstract(name, **options):
    return nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_published_parameter_counts(name):
    model = abstract(name)
    count = models.count_parameters(model) - 1024 * model.options.dim
    assert round(count / 1e6, 2) == PUBLISHED_MILLIONS[name]


@pytest.mark.parametrize("name", ["gpt_nano", "gpt_base", "gpt_medium", "gpt_large"])
def test_counts_in_closed_form(name):
    """GPT-2 without biases, with LayerScale; ToST has two projections and some tables less."""
    shape = models.options(name)
    dim, depth, heads = shape["dim"], shape["depth"], shape["heads"]
    tables = (50304 + 1024) * dim
    block = 12 * dim * dim + 4 * dim
    assert models.count_parameters(abstract(name)) == tables + depth * block + dim
    tost = tables + depth * (block - 2 * dim * dim + heads * 1025) + dim
    assert models.count_parameters(abstract(name.replace("gpt", "tost_lm"))) == tost


def test_gpt_base_has_the_published_size():
    assert round(models.count_parameters(abstract("gpt_base")) / 1e6) == 124


def test_what_biases_add():
    with_biases = abstract("gpt_nano", bias=True, qkv_bias=True)
    added = models.count_parameters(with_biases) - models.count_parameters(abstract("gpt_nano"))
    assert added == 3 * ((3 + 1 + 4 + 1) * 64 + 2 * 64) + 64


@pytest.mark.parametrize("seed", [0])
def test_initialisation(seed):
    model = models.create("tost_lm_nano", dim=256, vocab_size=500, rngs=nnx.Rngs(seed))
    assert np.std(model.token_embedding[...]) == pytest.approx(0.02, rel=0.03)
    assert np.std(model.positions.position_embedding[...]) == pytest.approx(0.02, rel=0.03)
    block = model.blocks[1]
    cut = 0.02 * 0.8796
    assert np.std(block.attention.qkv.kernel[...]) == pytest.approx(cut, rel=0.03)
    for kernel in (block.attention.out.kernel, block.mlp.contract.kernel):
        assert np.std(kernel[...]) == pytest.approx(cut / 6**0.5, rel=0.03)
    np.testing.assert_array_equal(block.layer_scale1.gamma[...], np.float32(1e-5))
    np.testing.assert_array_equal(block.attention.temperature[...], 1)
    np.testing.assert_array_equal(block.attention.denominator_bias[...], np.zeros((4, 1024)))


def test_intermediates_are_the_parts_of_the_logits():
    model = small(attention=["tssa", "softmax"])
    tokens = draw_tokens()
    logits, inside = model(tokens, return_intermediates=True)
    blocks = [f"{part}_{i}" for i in range(2) for part in ("block", "attention")]
    assert set(inside) == {"embed", "pre_logits", *blocks}
    embed = model.token_embedding[...][tokens] + model.positions.position_embedding[...][:12]
    np.testing.assert_allclose(inside["embed"], embed, rtol=0, atol=1e-6)
    np.testing.assert_allclose(inside["pre_logits"], model.norm(inside["block_1"]), atol=1e-5)
    table = np.asarray(model.token_embedding[...])
    np.testing.assert_allclose(logits, inside["pre_logits"] @ table.T, rtol=0, atol=1e-5)


def test_a_callable_is_the_kind_it_computes():
    tokens = draw_tokens()
    by_function = small(attention=jax.nn.dot_product_attention)
    np.testing.assert_allclose(
        apply(by_function, tokens), apply(small(attention="softmax"), tokens), rtol=0, atol=1e-5
    )
    with pytest.raises(NotImplementedError, match="dot_product_attention cannot go on token by"):
        by_function.start(1, 4)


def test_only_matrices_decay():
    model = small(attention="tssa")
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert models.decays(path) == (path[-1] == "kernel"), path
    assert sum(name.endswith("kernel") for name in by_path(nnx.state(model))) == 2 * 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "xca"}, ValueError, "attention 'xca' has no causal form"),
        ({"attention": ["xca", "tssa"]}, ValueError, "attention 'xca' has no causal form"),
        ({"position": "learnt"}, ValueError, "unknown position 'learnt'; did you mean 'learned'"),
        ({"position": "sincos", "dim": 15, "heads": 3}, ValueError, "dim must be even"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        ({"block_size": 2.0}, TypeError, "block_size must be an integer"),
        ({"bias": 1}, TypeError, "bias must be True or False"),
    ],
    ids=str,
)
def test_impossible_options(options, error, message):
    with pytest.raises(error, match=message):
        models.LanguageModelOptions(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2]], TypeError, "tokens must be an array, got list"),
        (np.zeros(3, int), ValueError, r"tokens must be \[batch, tokens\] .*got shape \(3,\)"),
        (np.zeros((1, 25), int), ValueError, r"with 1 to 24 tokens \(block_size\)"),
        (np.zeros((1, 0), int), ValueError, "with 1 to 24 tokens"),
        (np.zeros((1, 3)), TypeError, "tokens must be integers, got float64"),
    ],
    ids=["list", "rank", "long", "empty", "floats"],
)
def test_wrong_tokens(tokens, error, message):
    with pytest.raises(error, match=message):
        small()(tokens)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((2, 11), bool), ValueError, r"mask must be \[batch, tokens\] = \(2, 12\)"),
        (np.ones((2, 12)), TypeError, "mask must be boolean, True = a token, got float64"),
        ([True], TypeError, "mask must be a boolean array, got list"),
    ],
    ids=["shape", "floats", "list"],
)
def test_wrong_masks(mask, error, message):
    with pytest.raises(error, match=message):
        small()(draw_tokens(), mask=mask)


def test_a_wrong_record_and_a_capacity_too_large():
    with pytest.raises(TypeError, match="options must be a LanguageModelOptions, got ViTOptions"):
        models.LanguageModel(models.ViTOptions(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="capacity must be at most block_size = 24, got 25"):
        small().start(1, 25)
