"""Attention functions under JAX's transformations."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cumulant_jax as cj
from tests.attention.checks import assert_close, outputs_and_gradients
from tests.attention.subjects import SUBJECTS, Shape, make_inputs

subjects = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=str)
SHAPE = Shape(batch=(3,), queries=20, keys=30, heads=2, key_heads=2, dim=8, value_dim=8)


def per_example(inputs):
    return {n: (None if n == "temperature" else 0) for n in inputs}


@subjects
def test_jit_equals_eager(subject):
    inputs = make_inputs(subject, SHAPE, seed=0)
    assert_close(jax.jit(subject.call)(inputs), subject.call(inputs), what="output", tolerance=1e-6)


@subjects
def test_vmap_equals_batch(subject):
    inputs = make_inputs(subject, SHAPE, seed=0)
    mapped = jax.jit(jax.vmap(subject.call, in_axes=(per_example(inputs),)))(inputs)
    assert_close(mapped, jax.jit(subject.call)(inputs), what="output", tolerance=1e-6)
    gradient = jax.grad(lambda i: jnp.sum(jnp.sin(subject.call(i))))
    one = {n: x if n == "temperature" else x[1] for n, x in inputs.items()}
    many = jax.jit(jax.vmap(gradient, in_axes=(per_example(inputs),)))(inputs)
    for name, expected in jax.jit(gradient)(one).items():
        assert_close(many[name][1], expected, what=f"gradient of {name}", tolerance=1e-5)


@subjects
def test_checkpoint_and_scan_keep_the_gradient(subject):
    inputs = make_inputs(subject, SHAPE, seed=0)

    def plain(i):
        return jnp.sum(jnp.sin(subject.call(i)))

    def scanned(i):
        def step(total, _):
            return total + jnp.sum(jnp.sin(jax.checkpoint(subject.call)(i))), None

        return jax.lax.scan(step, 0.0, None, length=2)[0] / 2

    expected = jax.jit(jax.grad(plain))(inputs)
    for name, gradient in jax.jit(jax.grad(scanned))(inputs).items():
        assert_close(gradient, expected[name], what=f"gradient of {name}", tolerance=1e-5)


@subjects
def test_same_input_same_bits(subject):
    inputs = make_inputs(subject, SHAPE, seed=0)
    cotangent = jnp.ones(jax.eval_shape(subject.call, inputs).shape)
    first = outputs_and_gradients(subject, inputs, cotangent)
    second = outputs_and_gradients(subject, inputs, cotangent)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("kind", ["linear", "cumulant3", "cumulant3_full", "cumulant4"])
def test_gradient_of_gradient(kind, x64):
    """A Hessian-vector product equals that of the plain dense form."""
    subject = SUBJECTS[kind]
    shape = Shape(batch=(), queries=1100, keys=1100, heads=1, key_heads=1, dim=4, value_dim=4)
    inputs = make_inputs(subject, shape, seed=0, dtype=jnp.float64)
    direction = make_inputs(subject, shape, seed=1, dtype=jnp.float64)

    def product(function):
        def inner(i):
            gradient = jax.grad(lambda i: jnp.sum(jnp.sin(function(i))))(i)
            return sum(jnp.vdot(gradient[n], direction[n]) for n in i)

        return jax.jit(jax.grad(inner))(inputs)

    actual = product(subject.call)
    expected = product(lambda i: subject.reference(jnp, **i))
    for name in inputs:
        assert_close(actual[name], expected[name], what=name, tolerance=1e-10)


@subjects
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_export(subject, platform):
    """Lowers for every platform on a machine that has none of the accelerators."""
    inputs = make_inputs(subject, SHAPE, seed=0)
    exported = jax.export.export(jax.jit(subject.call), platforms=[platform])(inputs)
    assert exported.platforms == (platform,)
    if platform == "cpu":
        restored = jax.export.deserialize(exported.serialize())
        np.testing.assert_array_equal(restored.call(inputs), jax.jit(subject.call)(inputs))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import cumulant_jax as cj

mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.standard_normal((4, 1500, 2, 8)), jnp.float32) for _ in range(3))
mask = jnp.asarray(random.random((4, 1500)) < 0.9)
spec = P("data", None, "heads", None)

for kind in ("softmax", "linear", "cumulant3", "cumulant3_full", "cumulant4"):
    def loss(q, k, v, mask):
        return jnp.sum(jnp.sin(cj.attention(kind, q, k, v, mask=mask)))
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    expected = jax.jit(gradient)(q, k, v, mask)
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    automatic = jax.jit(gradient)(*(put(x, spec) for x in (q, k, v)), put(mask, P("data")))
    manual = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(spec,) * 3 + (P("data"),),
                                   out_specs=(spec,) * 3))(q, k, v, mask)
    for name, e, a, m in zip("qkv", expected, automatic, manual):
        scale = np.abs(e).max()
        assert np.abs(a - e).max() < 1e-5 * scale, (kind, name, "automatic")
        assert np.abs(m - e).max() < 1e-5 * scale, (kind, name, "shard_map")
w = q
expected = cj.token_statistics_attention(w, temperature=1.0)
actual = jax.jit(jax.shard_map(lambda w: cj.token_statistics_attention(w, temperature=1.0),
                               mesh=mesh, in_specs=P("data"), out_specs=P("data")))(w)
assert np.abs(actual - expected).max() < 1e-6
print("equal on", jax.device_count(), "devices")
"""


def test_eight_devices_equal_one():
    """Automatic sharding and shard_map with checks on, in a process with eight CPU devices."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal on 8 devices" in done.stdout


def test_an_option_can_be_traced():
    q, k, v = make_inputs(SUBJECTS["cumulant3"], Shape(), seed=0).values()

    @jax.jit
    def run(scale):
        return cj.cumulant_attention(q, k, v, scale=scale)

    expected = cj.cumulant_attention(q, k, v, scale=0.25)
    assert_close(run(jnp.float32(0.25)), expected, what="output", tolerance=1e-6)
    gradient = jax.grad(lambda s: jnp.sum(run(s)))(jnp.float32(0.25))
    step = 1e-2
    difference = jnp.sum(run(jnp.float32(0.25 + step)) - run(jnp.float32(0.25 - step))) / (2 * step)
    assert abs(gradient - difference) < 1e-2 * abs(difference)


@subjects
def test_no_implicit_rank_promotion(subject):
    """Callers who forbid it can use the functions."""
    inputs = make_inputs(subject, SHAPE, seed=0)
    mask = jnp.ones((3, 1, 1, 30), bool)

    def run(inputs):
        out, pull_back = jax.vjp(lambda i: subject.call(i, mask=mask), inputs)
        return pull_back(out)

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(run, inputs)


@pytest.mark.parametrize("kind", ["linear", "cumulant3", "softmax"])
def test_export_with_symbolic_sizes(kind):
    """One exported program serves every batch size and length."""
    batch, tokens = jax.export.symbolic_shape("batch, tokens")
    shape = jax.ShapeDtypeStruct((batch, tokens, 2, 8), jnp.float32)
    call = jax.jit(lambda q, k, v: cj.attention(kind, q, k, v))
    exported = jax.export.export(call)(shape, shape, shape)
    for sizes in ((1, 5), (3, 40)):
        arrays = jax.random.normal(jax.random.key(0), (3, *sizes, 2, 8))
        assert_close(exported.call(*arrays), call(*arrays), what=str(sizes), tolerance=1e-6)


@subjects
@pytest.mark.parametrize("tokens", [4, 3000])
def test_an_empty_batch(subject, tokens):
    shape = Shape(batch=(0,), queries=tokens, keys=tokens, heads=2, key_heads=2)
    inputs = make_inputs(subject, shape, seed=0)
    mask = jnp.ones((0, 1, 1, tokens), bool)
    out, pull_back = jax.vjp(lambda i: subject.call(i, mask=mask), inputs)
    assert out.shape[0] == 0
    pull_back(out)


EXPLICIT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import cumulant_jax as cj

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 2000, 4, 8))
for kind in ("linear", "cumulant3", "cumulant4"):
    gradient = jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(cj.attention(kind, q, k, v)))))
    expected = np.asarray(gradient(q, k, v))
    with jax.set_mesh(mesh):
        actual = gradient(*(jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v)))
    assert np.abs(np.asarray(actual) - expected).max() < 1e-5 * np.abs(expected).max(), kind
print("equal")
"""


def test_explicit_mesh():
    """Axes that carry their sharding in the type, the default of `jax.make_mesh`."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-c", EXPLICIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
