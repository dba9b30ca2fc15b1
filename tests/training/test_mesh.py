import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from cumulant_jax.training.mesh import batch_sharding, make_mesh, state_shardings, to_devices


def test_the_mesh_has_auto_axes_over_all_devices():
    mesh = make_mesh("data=-1")
    assert mesh.shape == {"data": len(jax.devices())}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("dat=-1", "unknown mesh axis 'dat'; did you mean 'data'"),
        ("data=0", "expected data=SIZE"),
        ("data=x", "expected data=SIZE"),
        ("data=1000", "the number of devices"),
        ("data=1,data=1", "expected each axis once"),
        ("tensors=1", "did you mean 'tensor'"),
    ],
)
def test_wrong_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=f"config key mesh: .*{message}"):
        make_mesh(sizes)


def test_the_order_of_the_axes_is_fixed():
    mesh = make_mesh("tensor=1,sequence=1,fsdp=-1")
    assert mesh.axis_names == ("fsdp", "sequence", "tensor")


def test_a_rule_lays_out_the_last_axes_and_drops_what_does_not_divide():
    mesh = AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    shapes = {
        "blocks/0/attention/qkv/kernel": ((8, 12), PartitionSpec(("fsdp",), ("tensor",))),
        "blocks/0/attention/out/kernel": ((8, 8), PartitionSpec(("tensor",), ("fsdp",))),
        "blocks/0/mlp/expand/bias": ((16,), PartitionSpec(("tensor",))),
        "blocks/0/mlp/expand/kernel": ((7, 16), PartitionSpec(None, ("tensor",))),
        "patch_embedding/kernel": ((4, 4, 3, 8), PartitionSpec(None, None, None, ("fsdp",))),
        "head/kernel": ((8, 5), PartitionSpec(None, None)),
        "norm/scale": ((8,), PartitionSpec(None)),
    }
    for name, (shape, expected) in shapes.items():
        tree = {name: jax.ShapeDtypeStruct(shape, np.float32)}
        assert state_shardings(tree, mesh)[name].spec == expected, name


def test_the_first_rule_that_matches_decides_for_parameters_and_their_moments():
    mesh = make_mesh("data=-1")
    rules = (
        ("mlp/.*kernel$", PartitionSpec(None, "data")),
        ("kernel$", PartitionSpec("data", "an axis the mesh lacks")),
    )
    params = {"mlp": {"up": {"kernel": (4, 8), "bias": (8,)}}, "head": {"kernel": (8, 2)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    count = jax.ShapeDtypeStruct((), np.int32)
    tree = {"params": params, "opt_state": ({"count": count, "mu": params},)}
    specs = jax.tree.map(lambda s: s.spec, state_shardings(tree, mesh, rules=rules))
    for part in (specs["params"], specs["opt_state"][0]["mu"]):
        assert part["mlp"]["up"]["kernel"] == PartitionSpec(None, ("data",))
        assert part["head"]["kernel"] == PartitionSpec(("data",), None)
        assert part["mlp"]["up"]["bias"] == PartitionSpec(None)
    assert specs["opt_state"][0]["count"] == PartitionSpec()


def test_batches_are_copied_to_the_devices():
    mesh = make_mesh("data=-1")
    batch = {"image": np.arange(16, dtype=np.uint8).reshape(8, 2), "label": np.arange(8)}
    placed = to_devices({k: v.copy() for k, v in batch.items()}, batch_sharding(mesh))
    assert placed["image"].sharding == batch_sharding(mesh)
    assert placed["image"].dtype == np.uint8
    np.testing.assert_array_equal(placed["image"], batch["image"])
