"""Every attention function, in every implementation, against its plain float64 form.

Forward and each gradient by name, over shapes, dtypes, masks, scales and large means. The covering
subset runs by default; the full grid of lengths and dims is marked slow.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cumulant_jax as cj
from tests.attention import reference
from tests.attention.checks import (
    assert_close,
    check_against_reference,
    outputs_and_gradients,
)
from tests.attention.subjects import IMPLEMENTATIONS, SUBJECTS, Shape, Subject, make_inputs

LENGTHS = (1, 7, 64, 100, 197, 1000)
DIMS = (8, 16, 24, 48, 64, 100)

# Each length, each dim, 0, 1 and 3 batch axes, grouped heads, T ≠ S and dv ≠ d at least once.
COVERING = (
    Shape(batch=(), queries=1, keys=1, heads=1, key_heads=1, dim=8, value_dim=8),
    Shape(batch=(3,), queries=7, keys=7, heads=4, key_heads=2, dim=16, value_dim=24),
    Shape(batch=(2,), queries=64, keys=64, heads=3, key_heads=3, dim=24, value_dim=24),
    Shape(batch=(2, 1, 2), queries=100, keys=7, heads=2, key_heads=1, dim=48, value_dim=8),
    Shape(batch=(2,), queries=197, keys=197, heads=2, key_heads=2, dim=64, value_dim=64),
    Shape(batch=(), queries=3, keys=1000, heads=1, key_heads=1, dim=100, value_dim=100),
    Shape(batch=(1,), queries=1000, keys=100, heads=2, key_heads=1, dim=8, value_dim=16),
)
GRID = tuple(
    Shape(batch=batch, queries=length, keys=length, heads=2, key_heads=2, dim=dim, value_dim=dim)
    for length, dim, batch in itertools.product(LENGTHS, DIMS, ((), (2,), (1, 2, 1)))
)

subjects = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=str)
takers_of_queries = pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS.values() if s.takes_queries], ids=str
)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
seeds = pytest.mark.parametrize("seed", [0], ids=lambda s: f"seed{s}")


@subjects
@implementations
@seeds
@pytest.mark.parametrize("shape", COVERING, ids=str)
def test_shapes(subject, implementation, shape, seed):
    inputs = make_inputs(subject, shape, seed=seed)
    check_against_reference(subject, inputs, seed=seed, call={"implementation": implementation})


@pytest.mark.slow
@subjects
@implementations
@seeds
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_full_grid_of_shapes(subject, implementation, shape, seed):
    inputs = make_inputs(subject, shape, seed=seed)
    check_against_reference(subject, inputs, seed=seed, call={"implementation": implementation})


@subjects
@implementations
@seeds
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(subject, implementation, dtype, seed, x64):
    shape = Shape(queries=33, keys=50, heads=4, key_heads=2, dim=16, value_dim=8)
    inputs = make_inputs(subject, shape, seed=seed, dtype=dtype)
    output = jax.eval_shape(subject.call, inputs)
    assert output.dtype == inputs[subject.inputs[0]].dtype
    check_against_reference(subject, inputs, seed=seed, call={"implementation": implementation})


@takers_of_queries
def test_output_has_the_dtype_of_value(subject):
    inputs = make_inputs(subject, Shape(), seed=0)
    inputs["value"] = inputs["value"].astype(jnp.bfloat16)
    assert jax.eval_shape(subject.call, inputs).dtype == jnp.bfloat16
    inputs["value"] = inputs["value"].astype(jnp.float32)
    inputs["query"] = inputs["query"].astype(jnp.bfloat16)
    assert jax.eval_shape(subject.call, inputs).dtype == jnp.float32


MASKS = {
    "ragged": lambda keys: np.arange(keys) < np.array([keys, keys - 5, 1])[:, None],
    "left_padding": lambda keys: np.arange(keys) >= np.array([0, 5, keys - 1])[:, None],
    "empty_row": lambda keys: np.arange(keys) < np.array([keys - 2, 0, 3])[:, None],
    "scattered": lambda keys: np.random.default_rng(5).random((3, keys)) < 0.5,
}
MASK_SHAPE = Shape(batch=(3,), queries=11, keys=40, heads=4, key_heads=2, dim=16, value_dim=8)


@subjects
@implementations
@seeds
@pytest.mark.parametrize("poison", [False, True], ids=["clean", "nan"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(subject, implementation, mask, poison, seed):
    inputs = make_inputs(subject, MASK_SHAPE, seed=seed)
    keep = MASKS[mask](MASK_SHAPE.keys)
    given = dict(inputs)
    if poison:
        for name in subject.masked:
            given[name] = jnp.where(keep[:, :, None, None], inputs[name], jnp.nan)
    check_against_reference(
        subject,
        given,
        reference_inputs=inputs,
        mask=jnp.asarray(keep[:, None, None, :]),
        seed=seed,
        call={"implementation": implementation},
    )


@subjects
def test_an_empty_row_gives_zeros_and_zero_gradients(subject):
    inputs = make_inputs(subject, MASK_SHAPE, seed=0)
    mask = jnp.asarray(MASKS["empty_row"](MASK_SHAPE.keys)[:, None, None, :])
    cotangent = jnp.ones(jax.eval_shape(subject.call, inputs).shape)
    output, gradients = outputs_and_gradients(subject, inputs, cotangent, mask=mask)
    assert not np.asarray(output[1]).any()
    for name in set(gradients) - {"temperature"}:
        assert not np.asarray(gradients[name][1]).any(), name


@takers_of_queries
def test_masks_that_differ_between_query_heads(subject):
    inputs = make_inputs(subject, MASK_SHAPE, seed=0)
    mask = np.random.default_rng(3).random((3, MASK_SHAPE.heads, 1, MASK_SHAPE.keys)) < 0.6
    check_against_reference(subject, inputs, mask=jnp.asarray(mask), seed=0)


@subjects
def test_sequence_lengths_equal_a_mask(subject):
    inputs = make_inputs(subject, MASK_SHAPE, seed=0)
    lengths = jnp.array([40, 13, 0])
    mask = (jnp.arange(40) < lengths[:, None])[:, None, None, :]
    name = "key_value_seq_lengths" if subject.takes_queries else "seq_lengths"
    by_mask = jax.jit(lambda mask: subject.call(inputs, mask=mask))
    actual = jax.jit(lambda n: subject.call(inputs, **{name: n}))(lengths)
    np.testing.assert_allclose(actual, by_mask(mask), rtol=1e-5, atol=1e-6)
    others = jnp.array([3, 40, 40])
    both = jax.jit(lambda n: subject.call(inputs, mask=mask, **{name: n}))(others)
    meet = mask & (jnp.arange(40) < others[:, None])[:, None, None, :]
    np.testing.assert_allclose(both, by_mask(meet), rtol=1e-5, atol=1e-6)


@takers_of_queries
@pytest.mark.parametrize(
    "shape", [(40,), (1, 40), (3, 40), (4, 1, 40), (3, 1, 1, 40), (1, 1, 1, 40)]
)
def test_mask_shapes_that_broadcast(subject, shape):
    inputs = make_inputs(subject, MASK_SHAPE, seed=0)
    mask = np.random.default_rng(1).random(shape) < 0.7
    full = mask
    if shape in ((3, 40), (1, 40)):
        full = mask[:, None, None, :]
    full = np.broadcast_to(full, (3, 4, 1, 40))
    call = jax.jit(lambda mask: subject.call(inputs, mask=mask))
    actual, expected = call(mask), call(full)
    assert_close(actual, expected, what="output", tolerance=1e-6)


@takers_of_queries
@pytest.mark.parametrize("scale", [1.0, 0.05, "array"])
def test_scale(subject, scale):
    inputs = make_inputs(subject, Shape(queries=9, keys=13), seed=0)
    actual = subject.call(inputs, scale=jnp.float32(0.3) if scale == "array" else scale)
    value = 0.3 if scale == "array" else scale
    inputs = {n: np.asarray(x, np.float64) for n, x in inputs.items()}
    assert_close(actual, subject.reference(np, **inputs, scale=value), what="output")


@pytest.mark.parametrize("kind", [k for k in SUBJECTS if k.startswith("cumulant")])
@pytest.mark.parametrize("length", [50, 3000])
def test_large_means_lose_nothing(kind, length):
    """Keys of mean 1000 and deviation 1 are no less exact than keys of mean 0."""
    subject = SUBJECTS[kind]
    shape = Shape(batch=(1,), queries=5, keys=length, dim=8, value_dim=8)
    inputs = make_inputs(subject, shape, seed=0)
    check_against_reference(subject, inputs, seed=0)
    shifted = dict(inputs, key=inputs["key"] + 1000.0, value=inputs["value"] - 300.0)
    # The truth is computed from the same float32 numbers, so their own rounding does not count.
    truth = subject.reference(np, **{n: np.asarray(x, np.float64) for n, x in shifted.items()})
    error = np.asarray(subject.call(shifted), np.float64) - truth
    assert np.abs(error).max() < 2e-7 * 300, "no more than the rounding of the value's mean"
    check_against_reference(subject, dict(inputs, key=inputs["key"] + 1000.0), seed=0)


@pytest.mark.parametrize("kind", ["cumulant3", "cumulant4", "linear"])
def test_long_sequences_run_in_chunks(kind):
    """4,099 tokens, a prime: several chunks and a remainder."""
    subject = SUBJECTS[kind]
    shape = Shape(batch=(2,), queries=4099, keys=2503, heads=4, key_heads=2, dim=24, value_dim=16)
    inputs = make_inputs(subject, shape, seed=0)
    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 1, 2503)) < 0.9)
    check_against_reference(subject, inputs, mask=mask, seed=0)


VARIANTS = {
    "order1": {"order": 1},
    "order2_sum": {"order": 2, "reduction": "sum"},
    "order3_sum": {"order": 3, "reduction": "sum"},
    "order4_sum": {"order": 4, "reduction": "sum"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_other_forms_of_cumulant_attention(options, dtype, x64):
    def call(inputs, mask=None, **_):
        return cj.cumulant_attention(**inputs, mask=mask, **options)

    subject = Subject("variant", call, functools.partial(reference.cumulant, **options))
    inputs = make_inputs(subject, MASK_SHAPE, seed=0, dtype=dtype)
    mask = jnp.asarray(MASKS["empty_row"](MASK_SHAPE.keys)[:, None, None, :])
    check_against_reference(subject, inputs, mask=mask, seed=0)


@subjects
def test_class_token_outlier(subject):
    """One token 100 times larger than the rest, as class tokens can be."""
    inputs = make_inputs(subject, Shape(queries=50, keys=50), seed=0)
    name = "key" if "key" in inputs else "w"
    inputs[name] = inputs[name].at[:, 0].multiply(100.0)
    check_against_reference(subject, inputs, seed=0, tolerance=1e-4)
