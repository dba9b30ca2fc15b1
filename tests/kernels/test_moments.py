"""Features, moment sums and their algebra against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.kernels import (
    PolynomialFeatures,
    masked_mean,
    read_out,
    read_out_matrix,
    sum_moments,
)


@pytest.mark.parametrize("dim", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("all_pairs", [False, True])
def test_pairs_stand_for_the_whole_sum(dim, all_pairs):
    random = np.random.default_rng(dim)
    x = random.standard_normal((3, dim)).astype(np.float32)
    features = PolynomialFeatures(3, all_pairs=all_pairs)
    i, j, multiplicity = features.pair_indices(dim)
    got = np.asarray(features(jnp.asarray(x)))
    np.testing.assert_allclose(got[:, :dim], x)
    np.testing.assert_allclose(got[:, dim:-1], x[:, i] * x[:, j], rtol=1e-6)
    np.testing.assert_allclose(got[:, -1], 1)
    form = random.standard_normal((dim, dim))
    form = form + form.T if all_pairs else np.diag(np.diag(form))
    np.testing.assert_allclose(
        (multiplicity * form[i, j] * x[:, i] * x[:, j]).sum(-1),
        np.einsum("ni,ij,nj->n", x, form, x),
        rtol=1e-4,
        atol=1e-4,
    )


def test_features_of_each_order():
    x = jnp.array([[2.0, -3.0]])
    assert PolynomialFeatures(1)(x).tolist() == [[1]]
    assert PolynomialFeatures(2)(x).tolist() == [[2, -3, 1]]
    assert PolynomialFeatures(4)(x).tolist() == [[2, -3, 4, 9, 8, -27, 1]]


def test_masked_mean():
    x = jnp.array([1.0, 2.0, jnp.nan, 4.0]).reshape(4, 1, 1)
    mask = jnp.array([True, True, False, True])[:, None]
    assert float(masked_mean(x, mask)[0, 0]) == pytest.approx(7 / 3)
    assert float(masked_mean(x, jnp.zeros((4, 1), bool))[0, 0]) == 0
    assert masked_mean(x.astype(jnp.bfloat16), mask).dtype == jnp.float32


@pytest.mark.parametrize(("order", "all_pairs"), [(2, False), (3, False), (3, True), (4, False)])
def test_the_pivot_does_not_matter(order, all_pairs, x64):
    """The algebra from raw to centred moments is exact about any pivot."""
    random = np.random.default_rng(order)
    key, value = (jnp.asarray(random.standard_normal((30, 2, 6))) for _ in range(2))
    features = PolynomialFeatures(order, all_pairs=all_pairs)

    def matrix(key_pivot, value_pivot):
        sums = sum_moments(features, key, value, None, key_pivot=key_pivot, value_pivot=value_pivot)
        return read_out_matrix(
            features, sums, value_pivot, dim=6, scale=0.7, reduction_is_sum=False
        )

    zero = jnp.zeros((2, 6))
    elsewhere = [jnp.asarray(random.standard_normal((2, 6))) for _ in range(2)]
    np.testing.assert_allclose(matrix(zero, zero), matrix(*elsewhere), atol=1e-12)


def test_read_out_shares_moments_between_the_heads_of_a_group():
    random = np.random.default_rng(0)
    query = jnp.asarray(random.standard_normal((2, 7, 6, 5)), jnp.float32)
    matrix = jnp.asarray(random.standard_normal((2, 3, 5, 4)), jnp.float32)
    out = read_out(jnp.tanh, query, matrix)
    for head in range(6):
        expected = np.tanh(query[:, :, head]) @ matrix[:, head // 2]
        np.testing.assert_allclose(out[:, :, head], expected, rtol=1e-5, atol=1e-5)


def test_read_out_with_a_normaliser():
    query = jnp.ones((3, 1, 2))
    matrix = jnp.array([[[2.0, 1.0], [4.0, 2.0]]])
    out = read_out(jax.nn.relu, query, matrix, normalizer_eps=1.0)
    np.testing.assert_allclose(out, np.full((3, 1, 1), 6 / 4))
