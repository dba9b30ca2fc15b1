"""Weight decay by name."""

import jax
import pytest
from flax import nnx

from cumulant_jax import models

OPTIONS = {
    "softmax": {"qk_norm": "layer", "query_scale": 1.0, "layer_scale": 0.1},
    "tssa": {"layer_scale": 0.1},
    "xca": {},
    "mssa": {"pool": "mean", "position": "none"},
}


@pytest.mark.parametrize("attention", OPTIONS)
def test_matrices_decay_and_nothing_else(attention, small):
    """The names agree with an independent rule: what multiplies activations as a matrix decays."""
    model = small(attention=attention, **OPTIONS[attention])
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        is_table = path[-1] in ("class_token", "position_embedding")
        assert models.decays(path) == (parameter.ndim >= 2 and not is_table), path


def test_jax_key_paths_give_the_same_mask(small):
    params = nnx.state(small(query_scale=1.0), nnx.Param)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: models.decays(path), params)
    by_name = {path: models.decays(path) for path, _ in nnx.to_flat_state(params)}
    assert {path: leaf.get_value() for path, leaf in nnx.to_flat_state(mask)} == by_name
    assert sum(by_name.values()) == 1 + 2 * 4 + 1


def test_the_empty_path_does_not_decay():
    assert not models.decays(())
