"""The linear kinds build no [T, S] array: read off the program, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.attention.subjects import SUBJECTS, Shape, make_inputs

# Primes, so that no product or multiple of other sizes equals them.
QUERIES, KEYS = 1009, 1301


def array_shapes(subject, shape):
    """All array shapes in the lowered program of output and gradients."""
    inputs = make_inputs(subject, shape, seed=0)

    def run(inputs):
        output, pull_back = jax.vjp(subject.call, inputs)
        return output, pull_back(jnp.ones_like(output))

    text = jax.jit(run).lower(inputs).as_text()
    found = {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<([^>]+)>", text)}
    return found


def quadratic(shapes, queries, keys):
    """The shapes that hold at least an entry per pair of query and key."""
    sizes = {queries, keys}
    return [s for s in shapes if sum(d in sizes for d in s) >= 2 or queries * keys in s]


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=str)
def test_linear_kinds_build_no_quadratic_array(subject):
    shape = Shape(batch=(), queries=QUERIES, keys=KEYS, heads=1, key_heads=1, dim=8, value_dim=8)
    sized = shape.for_subject(subject)
    shapes = array_shapes(subject, shape)
    assert any(sized.keys in s for s in shapes), "the program was read"
    assert bool(quadratic(shapes, sized.queries, sized.keys)) == (not subject.linear_time)


@pytest.mark.parametrize("kind", ["cumulant2", "cumulant3", "cumulant4", "linear"])
def test_temporaries_do_not_grow_with_the_tokens(kind):
    """Beyond inputs, outputs and gradients, memory stays the size of a chunk."""
    subject = SUBJECTS[kind]

    def temporaries(tokens):
        shape = Shape(batch=(), queries=tokens, keys=tokens, heads=2, key_heads=2, dim=32)
        inputs = make_inputs(subject, shape, seed=0)
        gradient = jax.jit(jax.grad(lambda i: jnp.sum(jnp.sin(subject.call(i)))))
        analysis = gradient.lower(inputs).compile().memory_analysis()
        return analysis.temp_size_in_bytes, inputs["key"].nbytes

    small, _ = temporaries(1 << 14)
    large, token_bytes = temporaries(1 << 16)
    # The loss itself holds the output and its cotangent; linear attention a scaled query.
    assert large - small < 4 * token_bytes
