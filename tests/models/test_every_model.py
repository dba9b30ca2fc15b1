"""What holds for every model: gradients, remat, bfloat16, training against evaluation,
checkpoints, eight devices."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.models.random_models import random_model

IMAGES = {"image_size": 8, "channels": 2, "num_classes": 5, "dim": 16, "heads": 2}
TEXT = {"vocab_size": 11, "block_size": 8, "dim": 16, "heads": 2, "layer_scale": 0.5}
SEQUENCES = {"vocab_size": 11, "max_tokens": 8, "num_classes": 5, "dim": 16, "heads": 2}
CLIPS = {**IMAGES, "patch_size": 4, "frames": 4, "temporal_depth": 1}
MODELS = {
    "vit": {"name": "vit_nano2", **IMAGES},
    "tost": {"name": "tost_tiny_12", "patch_size": 2, **IMAGES},
    "xcit": {"name": "xcit_tiny_12", "patch_size": 2, **IMAGES},
    "vit_cab": {"name": "vit_cab_tiny_12", "patch_size": 2, **IMAGES},
    "crate": {"name": "crate_tiny", "patch_size": 2, **IMAGES},
    "tost_lm": {"name": "tost_lm_nano", **TEXT},
    "gpt": {"name": "gpt_nano", **TEXT},
    "vivit": {"name": "vivit_nano16x2", **CLIPS},
    "vivit_fe": {"name": "vivit_nano16x2_fe", **CLIPS},
    "vivit_fsa": {"name": "vivit_nano16x2_fsa", **CLIPS},
    "vivit_fdp": {"name": "vivit_nano16x2_fdp", **CLIPS},
    "sequence": {"name": "lra_image", **SEQUENCES},
    "pairs": {"name": "lra_retrieval", **SEQUENCES},
}
RATES = {"dropout": 0.1, "projection_dropout": 0.1, "drop_path": 0.2}
# They share nearly everything with another row, and the plain ViT has tests of its own besides.
SLOW = ("vit", "xcit", "vit_cab", "gpt", "vivit", "vivit_fdp", "sequence")
ROWS = [pytest.param(m, marks=[pytest.mark.slow] if m in SLOW else []) for m in MODELS]
every_model = pytest.mark.parametrize("model", ROWS)


def build(model, **options):
    """A small model of a row of the table, with random weights."""
    return random_model(**{**MODELS[model], "depth": 1, **options})


def draw(model, seed=0, batch=3):
    """Inputs for the model of a row."""
    example = build(model).options.example
    shape, rng = (batch, *example.shape[1:]), np.random.default_rng(seed)
    if jnp.issubdtype(example.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 11, shape))
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def evaluate(model, inputs, **options):
    """What a call gives, as one program."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda s, x: nnx.merge(graphdef, s)(x, **options))(state, inputs)


def flat(state):
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def run(model, inputs, *, train=False, rng=None):
    """Loss, gradients by name and other variables after the call, through split state."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, rest, inputs):
        def loss(params):
            model = nnx.merge(graphdef, params, rest)
            logits = model(inputs, train=train, rng=rng)
            loss = -jax.nn.log_softmax(logits)[:, 1].mean()
            return loss, nnx.split(model, nnx.Param, ...)[2]

        return jax.value_and_grad(loss, has_aux=True)(params)

    (value, after), gradients = step(params, rest, inputs)
    return value, flat(gradients), flat(after)


@every_model
@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0])
def test_gradients_are_those_of_finite_differences(model, train, seed):
    with jax.enable_x64(True):
        built = build(model, dtype="float64", param_dtype="float64", seed=seed)
        x = draw(model, seed)
        graphdef, params, rest = nnx.split(built, nnx.Param, ...)
        random = np.random.default_rng(seed)
        direction = jax.tree.map(lambda p: jnp.asarray(random.standard_normal(p.shape)), params)

        @jax.jit
        def loss(step):
            moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
            logits = nnx.merge(graphdef, moved, rest)(x, train=train)
            return -jax.nn.log_softmax(logits)[:, 1].mean()

        # The relu of CRATE has kinks: a short step crosses none of them.
        step = 1e-7
        difference = (loss(step) - loss(-step)) / (2 * step)
        _, gradients, _ = run(built, x, train=train)
    slope = sum(np.vdot(gradients[name], d) for name, d in flat(direction).items())
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(slope, difference, rtol=1e-6)
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() > 0, name


@every_model
def test_bfloat16_is_finite_and_close(model):
    exact = build(model)
    half = nnx.merge(nnx.graphdef(build(model, dtype="bfloat16")), nnx.state(exact))
    logits, inside = evaluate(half, draw(model), return_intermediates=True)
    assert logits.dtype == jnp.float32
    assert inside["block_0"].dtype == jnp.bfloat16
    want = evaluate(exact, draw(model))
    # In the norm: rounding the parameters alone moves a logit of the deepest of these models by 2%.
    assert np.linalg.norm(logits - want) < 0.04 * np.linalg.norm(want)
    value, gradients, after = run(half, draw(model), train=True)
    assert np.isfinite(value)
    for name, value in {**gradients, **after}.items():
        assert value.dtype == jnp.float32, name
        assert np.isfinite(value).all(), name


@every_model
def test_remat_changes_nothing(model):
    key = jax.random.key(0)
    plain, remat = (
        run(build(model, remat=r, **RATES), draw(model), train=True, rng=key) for r in (False, True)
    )
    np.testing.assert_allclose(plain[0], remat[0], rtol=1e-6)
    for before, after in zip(plain[1:], remat[1:], strict=True):
        assert set(before) == set(after)
        for name, value in before.items():
            np.testing.assert_allclose(value, after[name], rtol=1e-4, atol=1e-6, err_msg=name)


@every_model
def test_training_differs_from_evaluation(model):
    built = build(model, **RATES)
    graphdef, state = nnx.split(built)

    @functools.partial(jax.jit, static_argnames="train")
    def call(state, x, key, *, train):
        return nnx.merge(graphdef, state)(x, train=train, rng=key)

    first, second = (jax.random.key(seed) for seed in (0, 1))
    evaluated = call(state, draw(model), first, train=False)
    np.testing.assert_array_equal(evaluated, call(state, draw(model), second, train=False))
    trained = call(state, draw(model), first, train=True)
    np.testing.assert_array_equal(trained, call(state, draw(model), first, train=True))
    assert np.abs(trained - evaluated).max() > 1e-3
    assert np.abs(trained - call(state, draw(model), second, train=True)).max() > 1e-3


@every_model
def test_other_variables_move_in_training_alone(model):
    """The running statistics of the stem, and nothing else, are no parameters."""
    built = build(model)
    before = {name: np.asarray(v) for name, v in flat(nnx.state(built, nnx.BatchStat)).items()}
    has_norms = model in ("tost", "xcit", "vit_cab")
    assert bool(before) == has_norms
    for train in (False, True):
        _, _, after = run(built, draw(model), train=train)
        assert set(after) == set(before)
        for name, value in after.items():
            moved = np.abs(value - before[name]).max() > 1e-4
            assert moved == train, name


@every_model
def test_a_checkpoint_brings_the_model_back(model, tmp_path):
    source, target = build(model, seed=0), build(model, seed=1)
    want = evaluate(source, draw(model))
    assert np.abs(evaluate(target, draw(model)) - want).max() > 1e-3
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(source)))
        checkpointer.wait_until_finished()
        abstract = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(target)))
        restored = checkpointer.restore(tmp_path / "model", abstract)
    state = nnx.state(target)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(target, state)
    np.testing.assert_array_equal(evaluate(target, draw(model)), want)


@every_model
def test_an_empty_batch(model):
    built = build(model, **RATES)
    logits = built(draw(model, batch=0), train=True, rng=jax.random.key(0))
    assert logits.shape[0] == 0
    for name, value in flat(nnx.state(built)).items():
        assert np.isfinite(value).all(), name


@every_model
def test_examples_do_not_see_each_other_in_evaluation(model):
    built = build(model)
    first, other = draw(model, seed=0), draw(model, seed=1)
    together = evaluate(built, first)
    mixed = evaluate(built, other.at[1].set(first[1]))
    np.testing.assert_allclose(mixed[1], together[1], rtol=0, atol=1e-5)
    assert np.abs(mixed[0] - together[0]).max() > 1e-3


SHARDED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from cumulant_jax import models

jax.config.update("jax_disable_most_optimizations", True)
mesh = jax.make_mesh((4, 2), ("data", "tokens"), axis_types=(AxisType.Auto,) * 2)
options = {"depth": 1, "layer_scale": 0.5, **json.loads(sys.argv[1])}
model = models.create(**options, rngs=nnx.Rngs(0))
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
example = model.options.example
inputs = 10 * jax.random.uniform(jax.random.key(0), (8, *example.shape[1:]))
inputs = inputs.astype(example.dtype)

def step(params, rest, inputs):
    def loss(params):
        model = nnx.merge(graphdef, params, rest)
        loss = -jax.nn.log_softmax(model(inputs, train=True))[:, 1].mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]
    return jax.value_and_grad(loss, has_aux=True)(params)

one = jax.jit(step)(params, rest, inputs)
# Rows of the image (tokens of a text, frames of a clip, the two of a pair) are split as well as the
# batch.
place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
split = place(inputs, P("data", "tokens"))
assert len(split.sharding.device_set) == 8
eight = dict(jax.tree_util.tree_leaves_with_path(
    jax.jit(step)(place(params, P()), place(rest, P()), split)))
for path, value in jax.tree_util.tree_leaves_with_path(one):
    error = np.abs(value - eight[path]).max()
    assert error < 1e-5, (jax.tree_util.keystr(path), error)
if isinstance(model, models.LanguageModel):
    one = models.generate(model, inputs[:, :4], max_new_tokens=4)
    split = models.generate(model, place(inputs[:, :4], P("data", "tokens")), max_new_tokens=4)
    assert (one == split).all()
print("equal on", jax.device_count(), "devices")
"""


@every_model
def test_eight_devices_equal_one(model):
    """Loss, gradients and running statistics, with the batch split four ways and tokens two."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, json.dumps(MODELS[model])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal on 8 devices" in done.stdout
