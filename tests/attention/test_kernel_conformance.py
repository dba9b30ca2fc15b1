"""The attention functions with each kernel implementation, in interpreters, against float64.

A covering set of shapes runs by default, the rest of the conformance suite's shapes when slow tests
are asked for. Memory starts as NaN there and races are errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import assume_device
from cumulant_jax.kernels.device import H100, TPU_V5E
from tests.attention.checks import assert_close, check_against_reference
from tests.attention.subjects import SUBJECTS, Shape, make_inputs
from tests.attention.test_causal import dense, outputs_and_gradients
from tests.attention.test_conformance import COVERING, MASKS
from tests.kernels.interpreters import interpreted

DTYPES = {"mosaic_tpu": ("float32", "bfloat16"), "mosaic_gpu": ("bfloat16", "float16")}
KINDS = ("linear", "cumulant2", "cumulant3", "cumulant4")
OPERATIONS = {"mosaic_tpu": (*KINDS, "token_statistics"), "mosaic_gpu": KINDS}
CAUSAL = ("mosaic_tpu",)
# One pass and two, grouped heads, T ≠ S, dv ≠ d, padded dims, lengths that fill no block.
FAST = (
    ("cumulant3", Shape(queries=20, keys=33, dim=24, value_dim=8)),
    ("cumulant2", Shape(batch=(1,), queries=9, keys=600, heads=2, key_heads=1, dim=16)),
    ("linear", Shape(batch=(), queries=70, keys=70, heads=1, key_heads=1, dim=64, value_dim=64)),
    ("token_statistics", Shape(batch=(2,), keys=45, heads=4, dim=24)),
    ("token_statistics", Shape(batch=(), keys=20, heads=2, dim=16)),
)
seeds = pytest.mark.parametrize("seed", [0], ids=lambda s: f"seed{s}")


def _cases(rows):
    return [
        pytest.param(implementation, kind, shape, id=f"{implementation}-{kind}-{shape}")
        for implementation, operations in OPERATIONS.items()
        for kind, shape in rows
        if kind in operations
    ]


def check(implementation, kind, shape, dtype, seed, **options):
    inputs = make_inputs(SUBJECTS[kind], shape, seed=seed, dtype=dtype)
    with interpreted(implementation):
        call = {"implementation": implementation}
        check_against_reference(SUBJECTS[kind], inputs, seed=seed, call=call, **options)


@pytest.mark.parametrize(("implementation", "kind", "shape"), _cases(FAST))
@seeds
def test_covering_shapes(implementation, kind, shape, seed):
    check(implementation, kind, shape, DTYPES[implementation][0], seed)


ALL = [(kind, shape) for kind in (*KINDS, "token_statistics") for shape in COVERING]


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "kind", "shape"), _cases(ALL))
@pytest.mark.parametrize("index", [0, 1], ids=["dtype0", "dtype1"])
@seeds
def test_all_shapes(implementation, kind, shape, index, seed):
    check(implementation, kind, shape, DTYPES[implementation][index], seed)


@pytest.mark.parametrize(
    ("implementation", "kind", "shape"),
    _cases([("cumulant3", Shape(batch=(3,), queries=5, keys=40, dim=16, value_dim=8))]),
)
@pytest.mark.parametrize(
    "mask",
    ["empty_row", *(pytest.param(m, marks=pytest.mark.slow) for m in MASKS if "row" not in m)],
)
@seeds
def test_masks_with_nan(implementation, kind, shape, mask, seed):
    dtype = DTYPES[implementation][0]
    inputs = make_inputs(SUBJECTS[kind], shape, seed=seed, dtype=dtype)
    keep = MASKS[mask](shape.keys)
    given = dict(inputs)
    for name in ("key", "value"):
        given[name] = jnp.where(keep[:, :, None, None], inputs[name], jnp.nan)
    with interpreted(implementation):
        check_against_reference(
            SUBJECTS[kind],
            given,
            reference_inputs=inputs,
            mask=jnp.asarray(keep[:, None, None, :]),
            seed=seed,
            call={"implementation": implementation},
        )


@pytest.mark.parametrize("implementation", CAUSAL)
@pytest.mark.parametrize(
    "kind",
    ["cumulant3", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "cumulant3")],
)
@seeds
def test_causal(implementation, kind, seed):
    """Output and gradients against the plain form on the tokens up to each one."""
    shape = Shape(batch=(1,), queries=150, keys=150, heads=2, key_heads=1, dim=16, value_dim=8)
    inputs = make_inputs(SUBJECTS[kind], shape, seed=seed)

    def call(i):
        return SUBJECTS[kind].call(i, is_causal=True, implementation=implementation)

    with interpreted(implementation):
        actual = outputs_and_gradients(call, inputs)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(x), jnp.float64) for n, x in inputs.items()}
        expected = outputs_and_gradients(lambda i: dense(kind, i), wide)
    assert_close(actual[0], expected[0], what="output", tolerance=5e-5)
    for name, gradient in actual[1].items():
        assert_close(gradient, expected[1][name], what=f"gradient of {name}", tolerance=5e-5)


@pytest.mark.parametrize("implementation", CAUSAL)
@pytest.mark.parametrize("kind", ["cumulant3", pytest.param("linear", marks=pytest.mark.slow)])
def test_split_and_resume(implementation, kind):
    """Two calls with the carried state, in the kernels, equal one in XLA."""
    shape = Shape(batch=(1,), queries=60, keys=60, heads=2, key_heads=2, dim=16, value_dim=16)
    inputs = make_inputs(SUBJECTS[kind], shape, seed=0)
    first, second = ({n: x[:, s] for n, x in inputs.items()} for s in (np.s_[:25], np.s_[25:]))
    whole = SUBJECTS[kind].call(inputs, is_causal=True)
    options = {"is_causal": True, "implementation": implementation, "return_state": True}
    with interpreted(implementation):
        out, state = SUBJECTS[kind].call(first, **options)
        rest, _ = SUBJECTS[kind].call(second, initial_state=state, **options)
    assert_close(jnp.concatenate([out, rest], 1), whole, what="output", tolerance=2e-5)


@pytest.mark.parametrize("implementation", OPERATIONS)
def test_keys_of_mean_1000(implementation):
    shape = Shape(batch=(1,), queries=9, keys=40, heads=1, key_heads=1, dim=16, value_dim=8)
    dtype = DTYPES[implementation][0]
    inputs = make_inputs(SUBJECTS["cumulant3"], shape, seed=0, dtype=dtype)
    inputs["key"] = (1000 + 8 * inputs["key"].astype(jnp.float32)).astype(dtype)
    with interpreted(implementation):
        call = {"implementation": implementation}
        check_against_reference(SUBJECTS["cumulant3"], inputs, seed=0, call=call, scale=0.05)


LOWERED = {"mosaic_gpu": ("cuda", "bfloat16"), "mosaic_tpu": ("tpu", "float32")}


@pytest.mark.parametrize(
    ("implementation", "causal"),
    [(n, c) for n in LOWERED for c in (False, True) if n in CAUSAL or not c],
)
@pytest.mark.parametrize("kind", ["cumulant2", "cumulant3", "cumulant4", "linear"])
@pytest.mark.parametrize("tokens", [197, 4096])
def test_lowering(implementation, kind, tokens, causal):
    """Forward and backward lower for the platform, on a machine that has no such device."""
    platform, dtype = LOWERED[implementation]
    x = jax.ShapeDtypeStruct((2, tokens, 2, 64), dtype)
    options = {"is_causal": causal, "implementation": implementation}

    @jax.jit
    def run(query, key, value):
        call = lambda *arrays: SUBJECTS[kind].call(  # noqa: E731
            dict(zip(("query", "key", "value"), arrays, strict=True)), **options
        )
        out, pull = jax.vjp(call, query, key, value)
        return out, pull(out)

    with assume_device({"cuda": H100, "tpu": TPU_V5E}[platform]):
        exported = jax.export.export(run, platforms=[platform])(x, x, x)
    target = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform]
    assert target in exported.mlir_module()
