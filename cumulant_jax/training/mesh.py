"""The device mesh, and the rules that lay parameters and batches out on it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cumulant_jax.naming import unknown_name

#: The axes a mesh may have, in the order of the mesh.
AXES = ("data",)

#: The axes that split the examples of a batch.
BATCH_AXES = ("data",)

#: (pattern of the parameter's path, its layout): the first pattern found in the path decides.
#: Optimizer moments and moving averages have the parameter's path in theirs and so its layout.
#: Axes that the mesh lacks are dropped, and what no rule names is replicated.
PARAMETER_RULES: tuple[tuple[str, PartitionSpec], ...] = ((r".*", PartitionSpec()),)


def make_mesh(sizes: str = "data=-1", *, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the device mesh.

    Args:
      sizes: comma-separated `axis=size`; one size may be -1, for all devices that remain.
      devices: the devices to use, by default all of them.

    Raises:
      NotImplementedError: if several processes take part.
      ValueError: for an unknown axis, or sizes whose product is not the number of devices.

    >>> make_mesh("data=-1").axis_names
    ('data',)
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"training with {jax.process_count()} processes is not supported yet; start one "
            "process, which uses all devices of its machine."
        )
    devices = jax.devices() if devices is None else devices
    shape = _parse_sizes(sizes)
    if -1 in shape.values():
        rest = int(np.prod([size for size in shape.values() if size != -1]))
        shape = {k: len(devices) // rest if v == -1 else v for k, v in shape.items()}
    if int(np.prod(list(shape.values()))) != len(devices):
        raise ValueError(
            f"config key mesh: got {sizes!r}, expected sizes whose product is the number of "
            f"devices, {len(devices)}."
        )
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        # Spelled out, because the default of jax.make_mesh is Explicit.
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices,
    )


def _parse_sizes(sizes: str) -> dict[str, int]:
    shape = {}
    for part in sizes.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise ValueError(f"config key mesh: {unknown_name('mesh axis', name, AXES)}")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ValueError(f"config key mesh: got {part!r}, expected {name}=SIZE, or -1.")
        shape[name] = int(size)
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"config key mesh: got {sizes!r}, expected -1 at most once.")
    return shape


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the layout of a batch: the first axis split over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in BATCH_AXES if a in mesh.axis_names)))


def batch_divisor(mesh: Mesh) -> int:
    """Returns the number that a batch size must be a multiple of."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.axis_names]))


def state_shardings(
    tree: Any,
    mesh: Mesh,
    *,
    rules: tuple[tuple[str, PartitionSpec], ...] = PARAMETER_RULES,
) -> Any:
    """Returns a tree of NamedShardings for a tree of arrays or shapes, by the rules.

    Scalars (counts, steps, keys) are replicated.
    """

    def sharding(path, leaf) -> NamedSharding:
        name = path_name(path)
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), PartitionSpec())
        return NamedSharding(mesh, _fit(spec, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def path_name(path: tuple) -> str:
    """Joins a pytree path: "params/blocks/0/attention/query/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _fit(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Drops the axes that the mesh lacks, and the dimensions that the array lacks."""

    def known(entry):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if name in mesh.axis_names) or None

    return PartitionSpec(*(known(entry) for entry in tuple(spec)[: len(shape)]))


def to_devices(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Starts the transfer of a batch to the devices; returns at once.

    Args:
      batch: arrays [B, ...]; with several processes, this process's share of the batch.
      sharding: the layout of the whole batch.
    """
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
