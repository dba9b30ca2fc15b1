"""Position embeddings against a formula written out loop by loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax.models.layers.positions import (
    POSITIONS,
    fourier_2d,
    resize_positions,
    sincos_2d,
)


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


@pytest.mark.parametrize(("grid", "hidden"), [((1, 1), 32), ((3, 5), 8), ((14, 14), 32)])
def test_fourier_table_against_loops(grid, hidden):
    table = fourier_2d(grid, hidden=hidden)
    for row in range(grid[0]):
        for column in range(grid[1]):
            got = table[row * grid[1] + column]
            for j in range(hidden):
                wave = math.sin if j % 2 == 0 else math.cos
                frequency = 2 * math.pi / 10000 ** (2 * (j // 2) / hidden)
                for place, side, offset in ((row, grid[0], 0), (column, grid[1], hidden)):
                    want = wave((place + 1) / (side + 1e-6) * frequency)
                    # The angles, up to 2 pi, are rounded to float32.
                    assert abs(got[offset + j] - want) < 1e-6


def test_fourier_is_a_linear_map_of_its_table_and_leaves_the_class_token():
    positions = build("fourier", (2, 3), prefix_tokens=1)
    tokens = jax.random.normal(jax.random.key(0), (2, 7, 8))
    added = positions(tokens, grid=(2, 3)) - tokens
    np.testing.assert_array_equal(added[:, 0], 0)
    kernel, bias = positions.projection.kernel[...], positions.projection.bias[...]
    want = fourier_2d((2, 3)) @ np.asarray(kernel) + np.asarray(bias)
    np.testing.assert_allclose(added[1, 1:], want, rtol=0, atol=1e-5)
    assert np.abs(bias).max() <= 1 / 8
    assert np.abs(bias).max() > 0


def test_fourier_takes_any_grid():
    positions = build("fourier", (2, 3))
    assert positions(jnp.zeros((1, 20, 8)), grid=(4, 5)).shape == (1, 20, 8)


TIMM_SIZES = ["48x32", "24x40", "64x64", "16x16", "16x64"]


@pytest.mark.parametrize("size", TIMM_SIZES)
def test_resizing_is_timms(size, load_timm):
    """Oblong grids, larger and smaller, and one with as many patches in another shape."""
    weights, expected = load_timm("timm_vit_a_token")
    table = weights["positions.position_embedding"]
    height, width = map(int, size.split("x"))
    grids = {"old_grid": (4, 4), "new_grid": (height // 8, width // 8), "prefix_tokens": 1}
    got = resize_positions(jnp.asarray(table), **grids)
    np.testing.assert_allclose(got, expected[f"pos_embed_{size}"], rtol=0, atol=2e-6)
    with jax.enable_x64(True):
        got = resize_positions(jnp.asarray(table, "float64"), **grids)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, expected[f"pos_embed_{size}_f64"], rtol=0, atol=1e-10)


def keys_weights(old, new):
    """Weights [new, old] of Keys' cubic, a = -1/2, wider where the axis shrinks, summing to 1."""
    stretch = max(1.0, old / new)
    weights = np.zeros((new, old))
    for i in range(new):
        center = (i + 0.5) * old / new - 0.5
        for j in range(old):
            x = abs(center - j) / stretch
            if x < 1:
                weights[i, j] = 1.5 * x**3 - 2.5 * x**2 + 1
            elif x < 2:
                weights[i, j] = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        weights[i] /= weights[i].sum()
    return weights


@pytest.mark.parametrize(
    ("old", "new"), [((5,), (8,)), ((2, 3, 4), (4, 3, 2)), ((4, 2, 6), (2, 5, 3))]
)
@pytest.mark.parametrize("seed", [0])
def test_resizing_along_any_number_of_axes(seed, old, new):
    """Each axis is resized by itself, as in the weights written out."""
    random = np.random.default_rng(seed)
    prefix, patches = random.standard_normal((1, 2, 3)), random.standard_normal((*old, 3))
    want = patches
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        want = np.moveaxis(np.tensordot(keys_weights(before, after), want, (1, axis)), 0, axis)
    table = np.concatenate([prefix, patches.reshape(1, -1, 3)], axis=1)
    with jax.enable_x64(True):
        got = resize_positions(jnp.asarray(table), old_grid=old, new_grid=new, prefix_tokens=2)
    np.testing.assert_array_equal(got[:, :2], prefix)
    np.testing.assert_allclose(got[:, 2:], want.reshape(1, -1, 3), rtol=0, atol=1e-12)


def test_resizing_keeps_the_dtype_and_computes_in_float32():
    table = jax.random.normal(jax.random.key(0), (1, 16, 8)).astype(jnp.bfloat16)
    got = resize_positions(table, old_grid=(4, 4), new_grid=(6, 6))
    want = resize_positions(table.astype(jnp.float32), old_grid=(4, 4), new_grid=(6, 6))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_the_same_grid_gives_the_same_table():
    table = jax.random.normal(jax.random.key(0), (1, 16, 8))
    assert resize_positions(table, old_grid=(4, 4), new_grid=(4, 4)) is table


@pytest.mark.parametrize(
    ("shape", "new_grid", "message"),
    [
        ((1, 16, 8), (4,), "new_grid must have as many axes as old_grid"),
        ((1, 16, 8), (4, 0), "each of at least one patch; got"),
        ((1, 15, 8), (2, 2), r"table must be \[1, 16, dim\] .* got shape \(1, 15, 8\)"),
        ((16, 8), (2, 2), r"table must be .* got shape \(16, 8\)"),
    ],
)
def test_tables_and_grids_that_do_not_fit(shape, new_grid, message):
    with pytest.raises(ValueError, match=message):
        resize_positions(jnp.zeros(shape), old_grid=(4, 4), new_grid=new_grid)
