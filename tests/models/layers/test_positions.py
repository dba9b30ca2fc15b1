"""Position embeddings against a formula written out loop by loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.positions import POSITIONS, sincos_2d


def build(name, grid, *, prefix_tokens=0, dim=8):
    return POSITIONS[name](
        grid=grid,
        prefix_tokens=prefix_tokens,
        dim=dim,
        param_dtype=jnp.dtype("float32"),
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize(("grid", "dim"), [((1, 1), 4), ((3, 5), 16), ((14, 14), 64)])
def test_sincos_table_against_loops(grid, dim):
    table = sincos_2d(grid, dim)
    quarter = dim // 4
    for row in range(grid[0]):
        for column in range(grid[1]):
            for i in range(quarter):
                frequency = 1 / 10000 ** (i / quarter)
                want = [
                    math.sin(column * frequency),
                    math.cos(column * frequency),
                    math.sin(row * frequency),
                    math.cos(row * frequency),
                ]
                got = table[row * grid[1] + column, i::quarter]
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_sincos_refuses_a_dim_that_is_not_a_multiple_of_four():
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos_2d((2, 2), 6)


def test_sincos_leaves_the_class_token_and_has_no_parameters():
    positions = build("sincos2d", (2, 3), prefix_tokens=1)
    tokens = jax.random.normal(jax.random.key(0), (2, 7, 8))
    added = positions(tokens, grid=(2, 3)) - tokens
    np.testing.assert_array_equal(added[:, 0], 0)
    np.testing.assert_allclose(added[1, 1:], sincos_2d((2, 3), 8), rtol=0, atol=1e-6)
    assert not jax.tree.leaves(nnx.state(positions))


def test_learned_covers_the_class_token():
    positions = build("learned", (2, 3), prefix_tokens=1)
    assert positions.position_embedding.shape == (1, 7, 8)
    added = positions(jnp.zeros((2, 7, 8)), grid=(2, 3))
    np.testing.assert_array_equal(added[1], positions.position_embedding[...][0])


def test_learned_refuses_another_grid():
    with pytest.raises(ValueError, match=r"3 x 2 patches .* 2 x 3: .*sincos2d"):
        build("learned", (2, 3))(jnp.zeros((1, 6, 8)), grid=(3, 2))


def test_none_adds_nothing():
    tokens = jax.random.normal(jax.random.key(0), (2, 6, 8))
    np.testing.assert_array_equal(build("none", (2, 3))(tokens, grid=(2, 3)), tokens)
