"""The device mesh, and the rules that lay parameters and batches out on it."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cumulant_jax.models.layout import ACTIVATION_RULES
from cumulant_jax.naming import unknown_name

#: The axes a mesh may have, in the order of the mesh: devices that follow each other are the ones
#: with the fastest links between them, and the last axes communicate most.
#:   data      each device has examples of its own, and all parameters
#:   fsdp      the same, but a device keeps only its part of the parameters and their moments, and
#:             gets the others when a layer needs them
#:   sequence  each device has some of the tokens
#:   tensor    each device has some of the heads, and of the hidden features of the MLPs
AXES = ("data", "fsdp", "sequence", "tensor")

#: The axes that split the examples of a batch.
BATCH_AXES = ACTIVATION_RULES["batch"]

#: (pattern of the parameter's path, layout of its last axes): the first pattern found in the path
#: decides. Optimizer moments and moving averages have the parameter's path in theirs and so its
#: layout. Axes that the mesh lacks or that do not divide the array's are dropped, and what no rule
#: names is replicated. Of activations, see `cumulant_jax.models.layout`.
PARAMETER_RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(qkv|query|key_value|expand)/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"expand/bias$", PartitionSpec("tensor")),
    (r"(out|contract)/kernel$", PartitionSpec("tensor", "fsdp")),
    # Embeddings, heads, convolutions: their output features.
    (r"(kernel|embedding)$", PartitionSpec("fsdp")),
)


def make_mesh(sizes: str = "data=-1", *, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the device mesh.

    Args:
      sizes: comma-separated `axis=size`, axes of `AXES`; one size may be -1, for all devices that
        remain. The order does not matter.
      devices: the devices to use, by default all of them.

    Raises:
      ValueError: for an unknown axis, or sizes whose product is not the number of devices.

    >>> make_mesh("data=-1").axis_names
    ('data',)
    """
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
    shape = {axis: shape[axis] for axis in AXES if axis in shape}
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        # Spelled out, because the default of jax.make_mesh is Explicit.
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices,
    )


def check_sizes(sizes: str) -> None:
    """Checks the text of a mesh as far as it can be without the devices.

    Raises:
      ValueError: for an unknown axis, or a size that is none.
    """
    _parse_sizes(sizes)


def _parse_sizes(sizes: str) -> dict[str, int]:
    shape = {}
    for part in sizes.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise ValueError(f"config key mesh: {unknown_name('mesh axis', name, AXES)}")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise ValueError(f"config key mesh: got {part!r}, expected {name}=SIZE, or -1.")
        if name in shape:
            raise ValueError(f"config key mesh: got {sizes!r}, expected each axis once.")
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


@dataclasses.dataclass(frozen=True)
class DataShare:
    """The part of every batch that a process reads: number `index` of `count` equal ones."""

    index: int = 0
    count: int = 1


def data_share(mesh: Mesh, *, process_index: int | None = None) -> DataShare:
    """Returns which part of a batch a process reads.

    Processes whose devices hold the same examples, because the tokens or the heads are split
    between them, read the same part.

    Args:
      mesh: the device mesh.
      process_index: the process, by default this one.

    Raises:
      ValueError: the devices of a process hold examples that do not follow each other, or not as
        many as those of another; the message says which mesh would do.

    >>> data_share(make_mesh("data=-1"))
    DataShare(index=0, count=1)
    """
    process_index = jax.process_index() if process_index is None else process_index
    batch = batch_divisor(mesh)
    rows_of: dict[int, set[int]] = {}
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((batch,)).items():
        rows_of.setdefault(device.process_index, set()).update(range(*rows.indices(batch)))
    parts = {tuple(sorted(rows)) for rows in rows_of.values()}
    size = len(min(parts, key=len))
    if parts != {tuple(range(i, i + size)) for i in range(0, batch, size)}:
        raise ValueError(
            f"config key mesh: got {dict(mesh.shape)} on {len(rows_of)} processes, whose devices "
            "hold unequal or overlapping parts of a batch. Choose sizes of data and fsdp whose "
            "product is a multiple of the number of processes, or divides it."
        )
    return DataShare(min(rows_of[process_index]) // size, batch // size)


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
    """Lays a rule on the last axes of an array; drops what the mesh or the array lacks."""
    entries = tuple(spec)[-len(shape) :] if shape else ()
    fitted: list[tuple[str, ...] | None] = [None] * (len(shape) - len(entries))
    for entry, size in zip(entries, shape[len(fitted) :], strict=True):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        names = tuple(name for name in names if name in mesh.axis_names)
        fits = size % math.prod(mesh.shape[name] for name in names) == 0
        fitted.append(names if names and fits else None)
    return PartitionSpec(*fitted)


def to_devices(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Starts the transfer of a batch to the devices; returns at once.

    Args:
      batch: arrays [B, ...]; with several processes, the part that `data_share` says.
      sharding: the layout of the whole batch.
    """
    if jax.process_count() == 1:
        return jax.device_put(dict(batch), sharding)
    # Explicit, though the transfer guard does not know it.
    with jax.transfer_guard_host_to_device("allow"):
        return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
