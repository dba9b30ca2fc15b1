"""Counting operations, against formulas and against XLA's count."""

import jax
import jax.numpy as jnp
import pytest

from cumulant_jax.models.operations import Operations, count_operations


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def only(function, *args):
    (operations,) = count_operations(function, *args).values()
    return operations


def test_matrix_products():
    got = only(lambda x, y: jnp.einsum("bik,bkj->bij", x, y), shape(3, 4, 5), shape(3, 5, 7))
    assert got == Operations(macs=3 * 4 * 5 * 7)
    assert got.flops == 2 * got.macs


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    got = only(convolve, shape(2, 9, 8, 4), shape(3, 3, 4 // groups, 6))
    assert got == Operations(macs=2 * 5 * 4 * 6 * 9 * 4 // groups)


def test_loops_count_as_often_as_they_run():
    def loop(x):
        return jax.lax.fori_loop(0, 10, lambda _, y: y @ y, x)

    def nested(x):
        return jax.lax.scan(lambda y, _: (loop(y), None), x, length=3)[0]

    assert only(loop, shape(4, 4)).macs == 10 * 64
    assert only(nested, shape(4, 4)).macs == 30 * 64


def test_what_transformations_wrap_is_counted_once():
    def inner(x):
        return jax.jit(jax.checkpoint(lambda y: y @ y))(x)

    assert only(inner, shape(4, 4)).macs == 64
    assert only(jax.vmap(inner), shape(5, 4, 4)).macs == 5 * 64


def test_the_larger_branch_of_a_condition_counts():
    def choose(x):
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert sum(o.macs for o in count_operations(choose, shape(4, 4)).values()) == 2 * 64


def test_elementwise_arithmetic_and_reductions():
    got = only(lambda x: jnp.sum(jnp.exp(x) * 2.0 + x), shape(3, 5))
    assert got == Operations(elementwise=3 * 15 + 15)
    assert only(lambda x: x.astype("float32"), shape(3, dtype="int32")) == Operations()
    assert only(lambda n: n + 1, shape(3, dtype="int32")) == Operations()


def test_scopes():
    def function(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            y = jax.jit(lambda z: z @ z)(x)
        with jax.named_scope("other"):
            return y + 1.0

    counts = count_operations(function, shape(4, 4))
    assert counts["outer"] == Operations(macs=64)
    assert counts["other"] == Operations(elementwise=16)
    assert "inner" not in counts


def test_against_xla():
    """A program whose operations XLA does not count in its own way (as it does erf, or padding)."""

    def function(x, y):
        return jnp.sum((x @ y + 1.0) * 3.0)

    args = shape(8, 16), shape(16, 4)
    cost = jax.jit(function).lower(*args).cost_analysis()
    # XLA counts a sum over n entries as n - 1 additions.
    assert only(function, *args).flops == pytest.approx(cost["flops"], abs=1)


def test_what_cannot_be_counted():
    def unknown(x):
        return jax.lax.while_loop(lambda y: y[0] < 10, lambda y: y * 2, x)

    with pytest.raises(NotImplementedError, match="loop of unknown length"):
        count_operations(unknown, shape(3))
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(kernel, out_shape=shape(8, 128), interpret=True)
    with pytest.raises(NotImplementedError, match=r"kernel \(pallas_call\).*implementation='xla'"):
        count_operations(call, shape(8, 128))
