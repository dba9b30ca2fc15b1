"""ToST: its options, its named quirks, sizes, keys and initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.models import attention_kinds


@pytest.fixture
def tost(small):
    return functools.partial(small, name="tost_tiny_12", patch_size=2)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 1), (16, 2)])
def test_images_of_any_size(size, tost, images):
    graphdef, state = nnx.split(tost(depth=1))
    _, inside = jax.eval_shape(
        lambda state, x: nnx.merge(graphdef, state)(x, return_intermediates=True),
        state,
        images(size=size),
    )
    grid = (-(-size[0] // 2), -(-size[1] // 2))
    assert inside["embed"].shape == (3, grid[0] * grid[1], 16)
    assert inside["class_block_1"].shape == (3, 1 + grid[0] * grid[1], 16)


KINDS = [
    pytest.param(kind, marks=[] if kind in ("tssa", "cumulant3") else [pytest.mark.slow])
    for kind in attention_kinds()
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, tost, images):
    model = tost(attention=kind, depth=1)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def gradients(params):
        call = lambda params: nnx.merge(graphdef, params, rest)(images(), train=True)  # noqa: E731
        return jax.grad(lambda params: jnp.sum(jnp.sin(call(params))))(params)

    for path, gradient in nnx.to_flat_state(gradients(params)):
        assert np.isfinite(gradient[...]).all(), path
        assert np.abs(gradient[...]).max() > 0, path


def test_a_hybrid_has_the_blocks_of_its_parts(tost, images):
    hybrid = tost(attention=["tssa", "softmax"])
    _, inside = hybrid(images(), return_intermediates=True)
    pure = tost(attention="softmax")
    block = nnx.merge(nnx.graphdef(pure.blocks[1]), nnx.state(hybrid.blocks[1]))
    np.testing.assert_allclose(block(inside["block_0"])[0], inside["block_1"], rtol=0, atol=1e-6)


def test_the_skeleton_is_shared():
    """XCiT and ViT differ from ToST in the attention of their blocks and in nothing else."""
    for name in ("xcit", "vit_cab"):
        for size in ("tiny_12", "medium_24_p8"):
            theirs, ours = models.options(f"{name}_{size}"), models.options(f"tost_{size}")
            assert {key for key in ours if ours[key] != theirs[key]} == {"attention"}


@pytest.mark.parametrize(
    ("schedule", "rates"), [("constant", [0.3] * 4), ("linear", [0, 0.1, 0.2, 0.3])]
)
def test_drop_path_over_the_blocks(schedule, rates, tost):
    model = tost(depth=4, drop_path=0.3, drop_path_schedule=schedule)
    got = [block.drop_path.dropout.rate for block in model.blocks]
    np.testing.assert_allclose(got, rates, atol=1e-12)


@pytest.mark.parametrize("quirk", ["update_patches", "tokens_norm"])
def test_a_quirk_reaches_every_class_block(quirk, tost, images):
    model = tost(**{quirk: False}, class_depth=3)
    assert [getattr(block, quirk) for block in model.class_blocks] == [False] * 3
    got = model(images())
    assert np.abs(got - tost(class_depth=3)(images())).max() > 1e-3


def test_without_quirks_the_class_token_reads_patches_that_stay(tost, images):
    model = tost(update_patches=False, tokens_norm=False)
    _, inside = model(images(), return_intermediates=True)
    for index in range(2):
        np.testing.assert_array_equal(inside[f"class_block_{index}"][:, 1:], inside["block_1"])


def test_intermediates_are_the_parts_of_the_logits(tost, images):
    model = tost()
    logits, inside = model(images(), return_intermediates=True)
    features = model.norm(inside["class_block_1"])[:, 0]
    np.testing.assert_allclose(inside["pre_logits"], features, rtol=0, atol=1e-6)
    np.testing.assert_allclose(logits, model.head(features), rtol=0, atol=1e-5)
    headless = tost(num_classes=0)
    state = nnx.state(model)
    del state["head"]
    nnx.update(headless, state)
    np.testing.assert_allclose(headless(images()), features, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", ["learned", "sincos2d", "none"])
def test_other_positions(position, tost, images):
    model = tost(position=position, depth=1)
    _, inside = model(images(), return_intermediates=True)
    added = inside["embed"] - inside["patch_embedding"]
    want = np.zeros(added.shape[1:])
    if position == "learned":
        want = model.positions.position_embedding[...][0]
        with pytest.raises(ValueError, match=r"models\.resize"):
            model(images(size=(8, 10)))
    elif position == "sincos2d":
        want = models.layers.positions.sincos_2d((4, 4), 16)
    np.testing.assert_allclose(added, np.broadcast_to(want, added.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", ["dropout", "projection_dropout", "drop_path"])
def test_each_rate_acts_in_training_and_needs_a_key(rate, tost, images):
    model = tost(depth=1, **{rate: 0.5})
    with pytest.raises(ValueError, match=f"rng must be a key when train=True and {rate} is above"):
        model(images(), train=True)
    first, second = (model(images(), train=True, rng=jax.random.key(seed)) for seed in (0, 1))
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 6}, "patch_size must be one of 2, 4, 8, 16, as the stem halves"),
        ({"patch_size": (8, 16)}, r"patch_size must be one of .*got \(8, 16\)"),
        ({"patch_size": 32}, "patch_size must be one of"),
        ({"dim": 36, "heads": 4}, "dim must be a multiple of 8 with patch_size 16"),
        ({"position": "fourrier"}, "unknown position 'fourrier'; did you mean 'fourier'"),
        ({"position": "sincos2d", "dim": 24, "heads": 4, "patch_size": 2, "mlp_ratio": 0}, "mlp"),
        ({"class_depth": 0}, "class_depth must be at least 1, got 0"),
        ({"drop_path_schedule": "cosine"}, "unknown drop_path_schedule 'cosine'"),
        ({"drop_path": 1.0}, "drop_path must be at least 0 and below 1"),
        ({"qk_norm": "layer"}, "qk_norm must be None with attention='tssa'"),
        ({"heads": 5}, "dim must be a multiple of heads"),
    ],
    ids=str,
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        models.ToSTOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_norm": "yes"}, "tokens_norm must be True or False, got 'yes'"),
        ({"update_patches": 1}, "update_patches must be True or False, got 1"),
        ({"class_depth": 2.0}, "class_depth must be an integer, got 2.0"),
        ({"drop_path_schedule": None}, "drop_path_schedule must be one of constant, linear"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind(options, message):
    with pytest.raises(TypeError, match=message):
        models.ToSTOptions(**options)


def test_a_module_wants_its_record_and_floats(tost):
    with pytest.raises(TypeError, match="options must be a ToSTOptions, got ViTOptions"):
        models.ToST(models.ViTOptions(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"images must be \[batch, height, width, 2\] with height"):
        tost()(np.zeros((1, 8, 8, 3), "float32"))
    with pytest.raises(TypeError, match="images must be normalised floats, got uint8"):
        tost()(np.zeros((1, 8, 8, 2), "uint8"))


def test_models_of_equal_options_share_their_structure(tost):
    assert nnx.graphdef(tost(seed=0)) == nnx.graphdef(tost(seed=1))
    assert nnx.graphdef(tost()) != nnx.graphdef(tost(tokens_norm=False))


def test_training_keeps_the_structure(tost, images):
    """A step may merge with the structure that it split off, and a scan may carry the state."""
    model = tost(depth=1)
    before = nnx.split(model)
    model(images(), train=True)
    after = nnx.split(model)
    assert before[0] == after[0]
    assert jax.tree.structure(before[1]) == jax.tree.structure(after[1])


def test_initialisation():
    model = models.create("tost_tiny_12", depth=1, num_classes=500, rngs=nnx.Rngs(0))
    cut = 0.02 * 0.8796  # the standard deviation of a normal cut at two of its own
    for table in (model.blocks[0].attention.qkv, model.class_blocks[1].attention.key_value):
        assert np.std(table.kernel[...]) == pytest.approx(cut, rel=0.03)
        np.testing.assert_array_equal(table.bias[...], 0)
    np.testing.assert_array_equal(model.blocks[0].attention.temperature[...], np.ones(4))
    np.testing.assert_array_equal(model.blocks[0].layer_scale1.gamma[...], 1.0)
    deep = models.create("tost_tiny_24", depth=1, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(deep.class_blocks[0].layer_scale2.gamma[...], np.float32(1e-5))
