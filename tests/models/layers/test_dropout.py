"""Drop path: what it drops, how often, and that its mean is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.models.layers.dropout import DropPath


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_drops_whole_examples_at_its_rate(seed, rate):
    examples = 4000
    branch = jnp.ones((examples, 2, 3))
    dropped = np.asarray(DropPath(rate)(branch, train=True, rng=jax.random.key(seed)))
    per_example = dropped[:, 0, 0]
    np.testing.assert_array_equal(
        dropped, np.broadcast_to(per_example[:, None, None], dropped.shape)
    )
    np.testing.assert_allclose(np.unique(per_example), [0, 1 / (1 - rate)], rtol=1e-6)
    deviation = 4 * (rate * (1 - rate) / examples) ** 0.5
    assert abs((per_example == 0).mean() - rate) < deviation


def test_does_nothing_in_evaluation_or_at_rate_zero():
    branch = jax.random.normal(jax.random.key(0), (4, 2, 3))
    np.testing.assert_array_equal(DropPath(0.9)(branch), branch)
    np.testing.assert_array_equal(DropPath(0.0)(branch, train=True), branch)
