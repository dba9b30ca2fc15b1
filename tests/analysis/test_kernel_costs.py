"""Closed forms against counts: of the arrays of the reference passes, and of products by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.analysis.kernel_costs import KERNELS, Sizes, kernel_cost, predicted_seconds
from cumulant_jax.kernels import PolynomialFeatures, elu1, read_out, sum_moments

FEATURES = {
    "cumulant2": PolynomialFeatures(2),
    "cumulant3": PolynomialFeatures(3),
    "cumulant4": PolynomialFeatures(4),
    "linear": elu1,
}
SHAPE = (2, 7, 3, 4)


def sizes(kind, dtype="bfloat16"):
    batch, tokens, heads, dim = SHAPE
    itemsize = np.dtype(dtype).itemsize
    return Sizes.of(kind, batch=batch, tokens=tokens, heads=heads, dim=dim, itemsize=itemsize)


def arrays(kind, dtype):
    """Tokens, moments and read-out matrix as the reference passes have them."""
    tokens = jax.ShapeDtypeStruct(SHAPE, dtype)
    pivot = jax.ShapeDtypeStruct((SHAPE[0], *SHAPE[2:]), jnp.float32)
    moments = jax.eval_shape(
        lambda k, v, kp, vp: sum_moments(FEATURES[kind], k, v, None, key_pivot=kp, value_pivot=vp),
        *(tokens, tokens, pivot, pivot),
    )
    columns = SHAPE[3] + (kind == "linear")
    matrix = jax.ShapeDtypeStruct((*moments.shape[:-1], columns), jnp.float32)
    out = jax.eval_shape(
        lambda q, m: read_out(
            FEATURES[kind], q, m, normalizer_eps=1e-6 if kind == "linear" else None
        ),
        *(tokens, matrix),
    )
    assert out.shape == SHAPE
    return tokens, moments, matrix


def nbytes(*all_arrays):
    return sum(x.size * np.dtype(x.dtype).itemsize for x in all_arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", FEATURES)
def test_bytes_are_those_of_the_arrays(kind, dtype):
    x, moments, matrix = arrays(kind, dtype)
    expected = {
        "sum_moments": nbytes(x, x, moments),
        "sum_moments_backward": nbytes(x, x, moments, x, x),
        "read_out": nbytes(x, matrix, x),
        "read_out_backward": nbytes(x, matrix, x, x, matrix),
        "fused_attention": nbytes(*[x] * 4),
        "fused_attention_backward": nbytes(*[x] * 7),
        "causal_attention": nbytes(*[x] * 4, moments, moments),
        "causal_attention_backward": nbytes(*[x] * 7, moments, moments, moments),
    }
    for kernel, count in expected.items():
        assert kernel_cost(kernel, sizes(kind, dtype)).bytes == count, kernel


def multiply_adds(*loops):
    """Counts the innermost statements of nested loops."""
    return sum(1 for _ in np.ndindex(*loops))


@pytest.mark.parametrize("kind", FEATURES)
def test_flops_are_those_of_the_loops(kind):
    batch, tokens, heads, dim = SHAPE
    features = {"cumulant2": dim + 1, "cumulant3": 2 * dim + 1, "cumulant4": 3 * dim + 1}
    count, columns = features.get(kind, dim), dim + (kind == "linear")
    summing = 2 * multiply_adds(batch, tokens, heads, count, dim + 1)
    reading = 2 * multiply_adds(batch, tokens, heads, count, columns)
    again = reading if kind == "linear" else 0  # a quotient is read out before its derivative
    # All 7 tokens are one chunk: scores, then scores times values and 1.
    inside = 2 * multiply_adds(batch, heads, tokens, tokens, count)
    inside += 2 * multiply_adds(batch, heads, tokens, tokens, dim + 1)
    expected = {
        "sum_moments": summing,
        "sum_moments_backward": 2 * summing,
        "read_out": reading,
        "read_out_backward": 2 * reading + again,
        "fused_attention": summing + reading,
        "fused_attention_backward": 3 * summing + 2 * reading + again,
        "causal_attention": 2 * summing + inside,
        "causal_attention_backward": 3 * (2 * summing + inside),
    }
    for kernel, flops in expected.items():
        assert kernel_cost(kernel, sizes(kind)).flops == flops, kernel


def test_flops_are_those_that_xla_counts():
    def product(features, values):
        return jnp.einsum("bshf,bshv->bhfv", features, values)

    batch, tokens, heads, dim = SHAPE
    features = jax.ShapeDtypeStruct((batch, tokens, heads, 2 * dim + 1), jnp.float32)
    values = jax.ShapeDtypeStruct((batch, tokens, heads, dim + 1), jnp.float32)
    analysis = jax.jit(product).lower(features, values).compile().cost_analysis()
    assert kernel_cost("sum_moments", sizes("cumulant3")).flops == analysis["flops"]


def test_long_causal_products_grow_with_the_tokens_not_their_square():
    costs = [
        kernel_cost(
            "causal_attention",
            Sizes.of("cumulant3", batch=1, tokens=t, heads=1, dim=64, itemsize=2),
        )
        for t in (1024, 4096)
    ]
    assert costs[1].flops == 4 * costs[0].flops


def test_token_statistics_read_and_write_their_tokens_once():
    tokens = nbytes(jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16))
    for kernel in ("token_statistics", "causal_token_statistics"):
        assert kernel_cost(kernel, sizes("tssa")).bytes == 2 * tokens
        assert kernel_cost(f"{kernel}_backward", sizes("tssa")).bytes == 3 * tokens


def test_every_backward_kernel_costs_more_than_its_forward_one():
    for kernel in KERNELS:
        if not kernel.endswith("_backward"):
            forward, backward = (
                kernel_cost(name, sizes("cumulant3")) for name in (kernel, f"{kernel}_backward")
            )
            assert backward.bytes > forward.bytes
            assert backward.flops > forward.flops


def test_a_kernel_without_a_formula():
    assert kernel_cost("something_new", sizes("cumulant3")) is None


def test_the_slowest_of_three_is_the_time():
    rates = {"bandwidth": 10.0, "matmul_flops": 100.0}
    assert predicted_seconds(bytes=50, flops=100, **rates) == 5.0
    assert predicted_seconds(bytes=50, flops=900, **rates) == 9.0
    assert predicted_seconds(bytes=50, flops=900, issue_seconds=11.0, **rates) == 11.0
