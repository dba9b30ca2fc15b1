"""Where activations lie on a device mesh: one table from the name of an axis to axes of the mesh.

A model names the axes of its activations, and the partitioner of XLA does the rest. Without a mesh,
and on one whose axes are others than these, nothing happens: a caller with a mesh of their own lays
things out themselves.
"""

import functools
import logging
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

_logger = logging.getLogger(__name__)

#: Name of an axis of an activation to the axes of the mesh that split it.
ACTIVATION_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data", "fsdp"),
        "tokens": ("sequence",),
        "heads": ("tensor",),
        "hidden": ("tensor",),  # the features inside an MLP
    }
)

#: The axes of a mesh that the rules know.
MESH_AXES = tuple(dict.fromkeys(axis for axes in ACTIVATION_RULES.values() for axis in axes))


def constrain(x: Array, *axes: str | None) -> Array:
    """Asks the partitioner to lay an array out by the rules; the values are the same.

    Args:
      x: an array.
      *axes: for each axis of x its name in `ACTIVATION_RULES`, or None for one that every device
        holds whole. An axis that cannot be split evenly stays whole, and the log says so.

    Returns:
      x, with its layout in the ambient mesh (`jax.set_mesh`).

    >>> constrain(jax.numpy.ones((2, 16, 8)), "batch", "tokens", None).shape
    (2, 16, 8)
    """
    sizes = _mesh_axes()
    if not sizes:
        return x
    spec = [_fitting(name, size, sizes) for name, size in zip(axes, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def splits(name: str, size: int) -> int:
    """Over how many devices an axis of this name and size is split; 1 without a mesh.

    >>> splits("heads", 12)
    1
    """
    sizes = _mesh_axes()
    return math.prod(sizes[axis] for axis in _fitting(name, size, sizes) or ())


def _mesh_axes() -> dict[str, int]:
    """The sizes of the ambient mesh's axes, or nothing where the rules do not apply."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not types or not set(types) <= set(MESH_AXES):
        return {}
    if set(types.values()) != {AxisType.Auto} or mesh.size == 1:
        return {}
    return dict(mesh.shape)


def _fitting(name: str | None, size: int, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    if name is None:
        return None
    axes = tuple(axis for axis in ACTIVATION_RULES[name] if sizes.get(axis, 1) > 1)
    parts = math.prod(sizes[axis] for axis in axes)
    if size % parts:
        _warn(name, size, axes, parts)
        return None
    return axes or None


@functools.cache
def _warn(name: str, size: int, axes: tuple[str, ...], parts: int) -> None:
    """Says once that an axis stays whole."""
    _logger.warning(
        "%d %s cannot be split evenly over mesh axis %s of %d devices: each of them holds and "
        "computes them all",
        size,
        name,
        "*".join(axes),
        parts,
    )
