"""Reading out and the pass back through it, against float64 on the same rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import PolynomialFeatures, elu1
from cumulant_jax.kernels import read_out as xla_read_out
from cumulant_jax.kernels.mosaic_gpu import read_out, read_out_backward
from tests.kernels.case_id import case_id

SECOND, THIRD, FOURTH = (PolynomialFeatures(order) for order in (2, 3, 4))

# features, batch, tokens, heads, heads of the matrix, dim, value_dim, dtype
CASES = [
    (THIRD, 1, 1, 4, 2, 64, 64, "bfloat16"),
    (SECOND, 2, 7, 1, 1, 16, 24, "float16"),
    (THIRD, 2, 197, 2, 1, 48, 64, "bfloat16"),
    (THIRD, 1, 200, 1, 1, 128, 128, "bfloat16"),
    (FOURTH, 1, 100, 1, 1, 64, 24, "bfloat16"),
    (elu1, 1, 70, 2, 1, 48, 64, "bfloat16"),
    (jax.nn.relu, 1, 136, 1, 1, 128, 64, "float16"),
]
ALL = [
    (features, 1, tokens, heads, matrix_heads, dim, value_dim, dtype)
    for features in (SECOND, THIRD, elu1, jax.nn.relu, jnp.exp)
    for tokens, heads, matrix_heads, dim, value_dim, dtype in (
        (1, 2, 2, 16, 16, "float16"),
        (7, 6, 2, 24, 100, "bfloat16"),
        (100, 3, 1, 48, 64, "float16"),
        (197, 2, 2, 100, 24, "bfloat16"),
        (1000, 1, 1, 64, 128, "bfloat16"),
        (1000, 2, 1, 128, 128, "bfloat16"),
        (333, 1, 1, 128, 96, "float16"),
    )
] + [(FOURTH, 1, 1000, 2, 1, 64, 64, "bfloat16"), (FOURTH, 2, 197, 1, 1, 16, 48, "bfloat16")]


def _check(case, draw, in_float64, assert_close):
    features, batch, tokens, heads, matrix_heads, dim, value_dim, dtype = case
    random = draw(tokens + dim, dtype)
    query = random.normal(batch, tokens, heads, dim)
    eps = None if isinstance(features, PolynomialFeatures) else 0.5
    shape = jax.eval_shape(features, jax.ShapeDtypeStruct((1, dim), jnp.float32)).shape
    matrix = random.normal(
        batch, matrix_heads, shape[-1], value_dim + (eps is not None), dtype="float32"
    )
    if eps is not None:
        # Positive, so that the quotient is no average of signs, and of many magnitudes, so that its
        # gradient is no small difference of equal terms: roundings are not amplified.
        matrix = jnp.exp(1.5 * matrix)

    def truth(query, matrix):
        return xla_read_out(features, query, matrix, normalizer_eps=eps)

    out = read_out(features, query, matrix, eps)
    assert out.dtype == query.dtype
    assert_close(dtype, out=(out, in_float64(truth, query, matrix)))

    out_bar = random.normal(*out.shape)
    query_bar, matrix_bar = read_out_backward(features, query, matrix, eps, out_bar)
    assert query_bar.dtype == query.dtype

    def pull_back(query, matrix, bar):
        matrix = jnp.repeat(matrix, heads // matrix_heads, axis=1)  # a gradient per query head
        return jax.vjp(truth, query, matrix)[1](bar)

    expected = in_float64(pull_back, query, matrix, out_bar)
    pairs = {"query_bar": (query_bar, expected[0])}
    blocks = slice(None, -1) if eps is None else slice(None)
    columns = slice(None) if eps is None else slice(None, -1)
    got, want = np.asarray(matrix_bar), expected[1]
    pairs["matrix_bar"] = (got[..., blocks, columns], want[..., blocks, columns])
    if eps is None:
        pairs["constant_bar"] = (got[..., -1, :], want[..., -1, :])
    else:
        pairs["normalizer_bar"] = (got[..., -1], want[..., -1])
    assert_close(dtype, **pairs)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_read_out_and_its_gradients(case, interpreter, draw, in_float64, assert_close):
    _check(case, draw, in_float64, assert_close)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=case_id)
def test_read_out_and_its_gradients_in_all_shapes(
    case, interpreter, draw, in_float64, assert_close
):
    _check(case, draw, in_float64, assert_close)


@pytest.mark.slow
@pytest.mark.parametrize("features", [SECOND, THIRD])
def test_read_out_of_large_dims(features, interpreter, draw, in_float64, assert_close):
    random = draw(0)
    query = random.normal(1, 70, 1, 256)
    matrix = random.normal(1, 1, features.count(256), 256, dtype="float32")
    expected = in_float64(lambda q, m: xla_read_out(features, q, m), query, matrix)
    assert_close("bfloat16", out=(read_out(features, query, matrix), expected))


def test_large_matrices_do_not_overflow_float16(interpreter, draw, in_float64, assert_close):
    random = draw(0, "float16")
    query = random.normal(1, 20, 1, 16) / 1024
    matrix = 1e6 * random.normal(1, 1, 33, 16, dtype="float32").at[..., -1, :].set(0)
    expected = in_float64(lambda q, m: xla_read_out(THIRD, q, m), query, matrix)
    assert_close("float16", out=(read_out(THIRD, query, matrix), expected))
