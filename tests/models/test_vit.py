"""The vision transformer: options, training against evaluation, remat, dtypes, state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.costs.flops import count_flops
from cumulant_jax.models import attention_kinds


def loss_and_gradients(model, images, *, rng=None, train=False):
    """Loss and gradients by dotted path, through split state in a jitted pure function."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params, images):
        def loss(params):
            logits = nnx.merge(graphdef, params, rest)(images, train=train, rng=rng)
            return -jax.nn.log_softmax(logits)[:, 1].mean()

        return jax.value_and_grad(loss)(params)

    value, gradients = run(params, images)
    flat = {".".join(map(str, path)): g[...] for path, g in nnx.to_flat_state(gradients)}
    return value, flat


@pytest.mark.parametrize("kind", attention_kinds())
def test_every_kind_trains(kind, small, images):
    value, gradients = loss_and_gradients(small(attention=kind, depth=1), images())
    assert np.isfinite(value)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        assert np.abs(gradient).max() > 0 or name.endswith("qkv.bias"), name


OPTIONS = [
    {"pool": "mean", "position": "sincos2d", "qk_norm": "layer", "query_scale": 1.0},
    {"pool": "mean", "class_token": True, "fc_norm": False, "layer_scale": 0.01, "qk_norm": "rms"},
    {"position": "none", "qkv_bias": False, "mlp_ratio": 2.5, "attention": "cumulant3"},
    {"attention": ["tssa", "cumulant2"], "attention_options": [{}, {"reduction": "sum"}]},
    {"image_size": (4, 8), "patch_size": (2, 4), "attention": jax.nn.dot_product_attention},
]


@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
def test_every_option_trains(options, small, images):
    size = options.get("image_size", (8, 8))
    model = small(drop_path=0.1, **options)
    value, gradients = loss_and_gradients(
        model, images(size=size), train=True, rng=jax.random.key(0)
    )
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert set(gradients) == {
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def test_a_callable_is_the_kind_it_computes(small, images):
    by_name = small(attention="softmax")(images())
    by_function = small(attention=jax.nn.dot_product_attention)(images())
    np.testing.assert_allclose(by_name, by_function, rtol=0, atol=1e-6)


WRONG_ATTENTIONS = {
    "heads before tokens": lambda q, k, v: v.swapaxes(1, 2),
    "heads merged": lambda q, k, v: v.reshape(*v.shape[:2], -1),
    "tokens lost": lambda q, k, v: v[:, :1],
    "nothing": lambda q, k, v: None,
    "a pair": lambda q, k, v: (v, k),
    "integers": lambda q, k, v: v.astype(jnp.int32),
    "complex": lambda q, k, v: v.astype(jnp.complex64),
}


@pytest.mark.parametrize("wrong", WRONG_ATTENTIONS)
def test_what_a_callable_returns_is_checked(wrong, small, images):
    model = small(attention=WRONG_ATTENTIONS[wrong], depth=1)
    expected = r"attention must return floats \[batch, .*, here \(3, 17, 2, 8\) like its query"
    with pytest.raises(ValueError, match=expected):
        jax.eval_shape(model, images())


def test_a_hybrid_has_the_blocks_of_its_parts(small, images):
    """Block by block, the hybrid computes what the same block computes in a model of one kind."""
    hybrid = small(attention=["tssa", "softmax"])
    _, inside = hybrid(images(), return_intermediates=True)
    for index, kind in enumerate(["tssa", "softmax"]):
        pure = small(attention=kind)
        state = nnx.state(hybrid.blocks[index])
        block = nnx.merge(nnx.graphdef(pure.blocks[index]), state)
        before = inside["embed"] if index == 0 else inside["block_0"]
        after, attended = block(before)
        np.testing.assert_allclose(after, inside[f"block_{index}"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(attended, inside[f"attention_{index}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_intermediates_are_the_parts_of_the_logits(pool, small, images):
    model = small(pool=pool)
    plain = model(images())
    logits, inside = model(images(), return_intermediates=True)
    np.testing.assert_array_equal(logits, plain)
    blocks = [f"{part}_{i}" for i in range(2) for part in ("block", "attention")]
    assert set(inside) == {"patch_embedding", "embed", "pre_logits", *blocks}
    tokens = inside["block_1"]
    pooled = model.norm(tokens)[:, 0] if pool == "token" else model.norm(tokens.mean(1))
    np.testing.assert_allclose(inside["pre_logits"], pooled, rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.head(pooled), logits, rtol=0, atol=1e-5)
    assert tokens.shape == inside["embed"].shape == (3, 16 + (pool == "token"), 16)


def test_without_classes_the_features_come_out(small, images):
    with_head = small()
    without = small(num_classes=0)
    _, inside = with_head(images(), return_intermediates=True)
    np.testing.assert_allclose(without(images()), inside["pre_logits"], rtol=0, atol=1e-6)


def test_mean_pooling_leaves_the_class_token_out(small, images):
    model = small(pool="mean", class_token=True, fc_norm=False)
    _, inside = model(images(), return_intermediates=True)
    normed = model.norm(inside["block_1"])
    np.testing.assert_allclose(inside["pre_logits"], normed[:, 1:].mean(1), rtol=0, atol=1e-5)


def test_without_positions_patches_are_a_set(small, images):
    """Swapping the two halves of the image moves patches about; only positions can tell."""
    swapped = jnp.roll(images(), 4, axis=1)
    for position, same in (("none", True), ("sincos2d", False), ("learned", False)):
        model = small(position=position)
        assert np.allclose(model(images()), model(swapped), rtol=0, atol=1e-4) == same


def test_positions_without_a_table_take_any_size(small, images):
    larger = images(size=(12, 16))
    assert jax.eval_shape(small(position="sincos2d"), larger).shape == (3, 5)
    with pytest.raises(ValueError, match="images have 6 x 8 patches"):
        small()(larger)


@pytest.mark.parametrize("rate", ["dropout", "projection_dropout", "drop_path"])
def test_each_rate_acts_in_training_and_needs_a_key(rate, small, images):
    model = small(**{rate: 0.5})
    evaluated = model(images())
    np.testing.assert_array_equal(evaluated, small()(images()))
    trained = model(images(), train=True, rng=jax.random.key(0))
    again = model(images(), train=True, rng=jax.random.key(0))
    other = model(images(), train=True, rng=jax.random.key(1))
    np.testing.assert_array_equal(trained, again)
    assert not np.allclose(trained, evaluated)
    assert not np.allclose(trained, other)
    with pytest.raises(
        ValueError, match=f"rng must be a key when train=True and {rate} is above 0"
    ):
        model(images(), train=True)


def test_a_key_may_be_of_the_old_form(small, images):
    model = small(projection_dropout=0.5)
    typed, old = jax.random.key(7), jax.random.PRNGKey(7)
    np.testing.assert_array_equal(
        model(images(), train=True, rng=typed), model(images(), train=True, rng=old)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("rng", "came"),
    [
        (lambda: nnx.Rngs(0), "Rngs"),
        (lambda: 0, "int"),
        (lambda: np.zeros(2, np.uint32), "ndarray"),
        (lambda: jnp.zeros(3), r"float32 \[3\]"),
        (lambda: jnp.zeros(3, jnp.uint32), r"uint32 \[3\]"),
        (lambda: jnp.zeros((), jnp.uint32), r"uint32 \[\]"),
        (lambda: jnp.zeros((4, 2), jnp.uint32), r"uint32 \[4, 2\]"),
        (lambda: jax.random.split(jax.random.key(0), 4), r"an array \(4,\) of keys"),
    ],
    ids=["Rngs", "int", "NumPy", "floats", "long", "word", "old batch", "batch"],
)
def test_a_key_of_the_wrong_kind(rng, came, dropout, small, images):
    model = small(dropout=dropout)
    with pytest.raises(TypeError, match=f"rng must be one JAX random key, .*got {came}"):
        model(images(), train=True, rng=rng())


def test_flags_of_a_call_are_bools(small, images):
    with pytest.raises(TypeError, match="train must be True or False, got 'no'"):
        small()(images(), train="no")
    with pytest.raises(TypeError, match="return_intermediates must be True or False, got 1"):
        small()(images(), return_intermediates=1)


def test_training_without_rates_needs_no_key(small, images):
    np.testing.assert_array_equal(small()(images(), train=True), small()(images()))


def test_drop_path_rises_linearly_over_the_blocks(small):
    model = small(depth=5, drop_path=0.4)
    rates = [block.drop_path.dropout.rate for block in model.blocks]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3, 0.4], atol=1e-12)


@pytest.mark.parametrize("seed", [0])
def test_drop_path_drops_each_branch_of_each_example(seed, small, images):
    """Each example shows one of four ways to drop two branches; among many, all four occur."""
    model = small(drop_path=0.5)
    many = images(batch=32)
    _, inside = model(many, train=True, rng=jax.random.key(seed), return_intermediates=True)
    _, evaluated = model(many, return_intermediates=True)
    before = inside["block_0"]
    np.testing.assert_allclose(before, evaluated["block_0"], rtol=0, atol=1e-6)
    block = model.blocks[1]
    seen = np.zeros((2, 2), int)
    ways = {}
    for first in (0, 1):
        middle = before + 2 * first * inside["attention_1"]
        for second in (0, 1):
            ways[first, second] = middle + 2 * second * block.mlp(block.norm2(middle))
    for example in range(32):
        errors = {
            w: float(np.abs(x[example] - inside["block_1"][example]).max()) for w, x in ways.items()
        }
        nearest = min(errors, key=errors.__getitem__)
        assert errors[nearest] < 1e-4
        seen[nearest] += 1
    assert (seen > 0).all()


@pytest.mark.parametrize("policy", [True, "full", "dots"])
def test_remat_changes_nothing(small, images, policy):
    options = {"attention": ["softmax", "tssa"], "projection_dropout": 0.2}
    plain, remat = (small(remat=r, **options) for r in (False, policy))
    key = jax.random.key(0)
    value, gradients = loss_and_gradients(plain, images(), train=True, rng=key)
    value_remat, gradients_remat = loss_and_gradients(remat, images(), train=True, rng=key)
    np.testing.assert_allclose(value, value_remat, rtol=1e-6)
    assert set(gradients) == set(gradients_remat)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(
            gradient, gradients_remat[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_remat_recomputes(small, images):
    """The program of a remat model marks what its backward pass recomputes."""

    def program(remat):
        model = small(remat=remat)
        graphdef, state = nnx.split(model)
        loss = lambda state: nnx.merge(graphdef, state)(images()).sum()  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss))(state))

    assert program(True).count("remat2") + program(True).count("checkpoint") >= 2
    assert program(False).count("remat2") + program(False).count("checkpoint") == 0


def test_remat_of_dots_does_no_linear_layer_again(small, images):
    def flops(remat):
        model = small(remat=remat)
        graphdef, params = nnx.split(model)

        def loss(params):
            return jnp.sum(nnx.merge(graphdef, params)(images()))

        return count_flops(jax.grad(loss), params)

    # "full" does the forward pass of the blocks again, "dots" only the attention in them.
    assert flops(False) < flops("dots") < flops("full")
    assert flops("dots") - flops(False) < 0.5 * (flops("full") - flops(False))


@pytest.mark.parametrize("kind", ["softmax", "cumulant3", "tssa"])
def test_bfloat16_is_finite_and_close(kind, small, images):
    exact = small(attention=kind, depth=1)
    half = small(attention=kind, depth=1, dtype="bfloat16")
    half = nnx.merge(nnx.graphdef(half), nnx.state(exact))
    logits, inside = half(images(), return_intermediates=True)
    assert logits.dtype == jnp.float32
    assert inside["block_0"].dtype == jnp.bfloat16
    want = exact(images())
    scale = np.abs(want).max()
    np.testing.assert_allclose(logits, want, rtol=0, atol=0.05 * scale)
    _, gradients = loss_and_gradients(half, images())
    for name, gradient in gradients.items():
        assert gradient.dtype == jnp.float32, name
        assert np.isfinite(gradient).all(), name


def test_param_dtype(small, images):
    model = small(param_dtype="bfloat16", dtype="bfloat16", query_scale=1.0, layer_scale=0.1)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("bfloat16")}
    assert model(images()).dtype == jnp.float32


def test_state_round_trip_through_plain_arrays(small, images):
    """What a checkpoint does: arrays out, arrays into another model of the same options."""
    source, target = small(seed=0), small(seed=1)
    plain = nnx.to_pure_dict(nnx.state(source))
    state = nnx.state(target)
    nnx.replace_by_pure_dict(state, jax.tree.map(np.asarray, plain))
    nnx.update(target, state)
    np.testing.assert_array_equal(target(images()), source(images()))


def test_models_of_equal_options_share_their_structure(small):
    first, second = small(seed=0, attention="cumulant3"), small(seed=1, attention="cumulant3")
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))
    assert nnx.graphdef(first) != nnx.graphdef(small(attention="cumulant2"))


def test_the_model_is_parameters_only(small):
    """Nothing but parameters to carry along: dropout holds no keys."""
    _, params, rest = nnx.split(small(dropout=0.1, drop_path=0.1), nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    assert jax.tree.leaves(params)


def test_examples_do_not_see_each_other(small, images):
    model = small(attention="cumulant3")
    first, other = images(seed=0), images(seed=1)
    together, others = model(first), model(other)
    for i in range(3):
        mixed = model(other.at[i].set(first[i]))
        np.testing.assert_allclose(mixed[i], together[i], rtol=0, atol=1e-5)
        assert not np.allclose(mixed[i], others[i], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((8, 8, 2), "float32", ValueError, r"images must be \[batch, height, width, 2\]"),
        ((1, 8, 8, 3), "float32", ValueError, r"got shape \(1, 8, 8, 3\)"),
        ((1, 7, 8, 2), "float32", ValueError, "multiples of 2 and 2"),
        ((2, 0, 8, 2), "float32", ValueError, r"positive multiples .*got shape \(2, 0, 8, 2\)"),
        ((2, 8, 0, 2), "float32", ValueError, r"positive multiples .*got shape \(2, 8, 0, 2\)"),
        ((1, 8, 8, 2), "uint8", TypeError, "images must be normalised floats, got uint8"),
    ],
)
def test_wrong_images(shape, dtype, error, message, small):
    with pytest.raises(error, match=message):
        small()(np.zeros(shape, dtype))


def test_images_are_an_array(small):
    with pytest.raises(TypeError, match="images must be an array, got list"):
        small()(np.zeros((1, 8, 8, 2)).tolist())


def test_an_empty_batch_gives_no_logits(small, images):
    logits, inside = small()(images(batch=0), return_intermediates=True)
    assert logits.shape == (0, 5)
    assert {name: x.shape[0] for name, x in inside.items()} == dict.fromkeys(inside, 0)


@pytest.mark.parametrize("kind", attention_kinds())
def test_an_empty_batch_goes_through_every_kind(kind, small, images):
    model = small(attention=kind, depth=1, pool="mean", remat=True, dropout=0.1, drop_path=0.1)
    call = functools.partial(model, train=True, rng=jax.random.key(0))
    assert jax.eval_shape(call, images(batch=0)).shape == (0, 5)


@pytest.mark.parametrize("seed", [0])
def test_initialisation(seed):
    model = models.create("vit_nano4", dim=256, image_size=64, num_classes=500, rngs=nnx.Rngs(seed))
    cut = 0.02 * 0.8796  # the standard deviation of a normal cut at two of its own
    block = model.blocks[0]
    tables = [block.attention.qkv.kernel, block.mlp.expand.kernel, model.head.kernel]
    for table in (*tables, model.positions.position_embedding):
        assert np.std(table[...]) == pytest.approx(cut, rel=0.03)
        assert np.abs(table[...]).max() <= 0.04
    assert np.std(model.patch_embedding.kernel[...]) == pytest.approx(48**-0.5, rel=0.03)
    assert 0 < np.abs(model.class_token[...]).max() < 1e-5
    for bias in (block.attention.qkv.bias, block.mlp.contract.bias, model.head.bias):
        np.testing.assert_array_equal(bias[...], 0)
