"""Runs an operation where its arrays are: batch, heads and tokens may be sharded over a mesh.

XLA cannot see into a kernel, and gathers the tokens of a loop over chunks of them. So an operation
says which axes of its arrays are which, by letters as in einsum, and what it does on one shard; the
partitioner then leaves each array where it is:

  b batch    t tokens of the queries    s tokens of keys and values    k heads    h query heads

All other letters are axes that every shard needs whole.

XLA's compiler for CPUs and GPUs asks how each operation is to be split, wherever its arrays are.
That for TPUs does not ask (jax-ml/jax#38196): there the names of the ambient mesh's axes say it
(`jax.set_mesh`), and without a mesh every device works on the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cumulant_jax.kernels.device import current_device

_logger = logging.getLogger(__name__)

_SHARDED = "btsk"

# Platforms whose compiler asks.
_ASKING = ("cpu", "gpu")

# Where it does not, what axes of these names split; all others split the batch.
_TOKEN_AXES = ("sequence", "seq", "context")
_HEAD_AXES = ("tensor", "model", "heads")

# Letter to the mesh axes over which that axis is sharded.
Axes = Mapping[str, tuple[str, ...]]


class Operation(Protocol):
    """A hashable function of arrays, all of whose results are arrays in a tuple."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """One string of letters per argument, such as "btkd"."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """One string of letters per result."""
        ...

    @property
    def needs_one_batch_axis(self) -> bool:
        """Whether several batch axes must be made one first."""
        ...

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Runs on one shard; `axes` says over which mesh axes each letter is split."""
        ...

    def differentiable(self) -> Operation:
        """The same in operations that JAX can differentiate, for derivatives of derivatives."""
        ...


def is_alone() -> bool:
    """Whether the program is traced for one device, or one shard of shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        return True
    return current_device().count == 1


def run(operation: Operation, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs an operation on arrays, whatever way they are sharded.

    Args:
      operation: what to run.
      *arrays: its arguments; "b" may stand for any number of axes.

    Returns:
      Its results.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = set(mesh.axis_types) if not mesh.empty else set()
    if AxisType.Explicit in types and not mesh.manual_axes:
        return _run_explicit(operation, mesh, arrays)
    if not is_alone():
        asks = current_device().platform in _ASKING
        partitioned = _partitioned(operation) if asks else _partitioned_by_names(operation)
        return _with_one_batch_axis(partitioned, operation, arrays)
    if operation.needs_one_batch_axis:
        return _with_one_batch_axis(_alone(operation), operation, arrays)
    return operation({}, *arrays)


def run_directly(operation: Operation, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs an operation on one device, open to JAX's own differentiation."""
    if operation.needs_one_batch_axis:
        return _with_one_batch_axis(functools.partial(operation, {}), operation, arrays)
    return operation({}, *arrays)


def _with_one_batch_axis(function, operation: Operation, arrays) -> tuple[jax.Array, ...]:
    batch = arrays[0].shape[: arrays[0].ndim - len(operation.inputs[0]) + 1]
    if len(batch) == 1:
        return function(*arrays)
    flat = _reshape_batch(operation.inputs, arrays, len(batch), (math.prod(batch),))
    return _reshape_batch(operation.outputs, function(*flat), 1, batch)


def _reshape_batch(layouts: Sequence[str], arrays, replaced: int, batch: tuple[int, ...]):
    """Replaces the first axes of the arrays that have a batch, and leaves the others."""
    return tuple(
        x.reshape(*batch, *x.shape[replaced:]) if "b" in layout else x
        for layout, x in zip(layouts, arrays, strict=True)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_differentiable(operation: Operation, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`run`, where JAX differentiates the operation on each shard; see `collectives`."""
    return run(operation, *arrays)


def _pull_back(operation, arrays, cotangents):
    bars = iter(run(_PullBack(operation, _which_float(arrays)), *arrays, *cotangents))
    return tuple(next(bars) if is_float else None for is_float in _which_float(arrays))


run_differentiable.defvjp(lambda operation, *x: (run(operation, *x), x), _pull_back)


def _which_float(arrays: Sequence[jax.Array]) -> tuple[bool, ...]:
    return tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)


@dataclasses.dataclass(frozen=True)
class _PullBack:
    """The arguments of an operation and cotangents of its results -> those of its arguments."""

    operation: Operation
    is_float: tuple[bool, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.operation.inputs, *self.operation.outputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(itertools.compress(self.operation.inputs, self.is_float))

    @property
    def needs_one_batch_axis(self) -> bool:
        return self.operation.needs_one_batch_axis

    def differentiable(self) -> _PullBack:
        return _PullBack(self.operation.differentiable(), self.is_float)

    def __call__(self, axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        count = len(self.is_float)
        _, pull = jax.vjp(functools.partial(self.operation, axes), *arrays[:count])
        return tuple(itertools.compress(pull(arrays[count:]), self.is_float))


@functools.lru_cache(maxsize=1024)
def _alone(operation: Operation):
    """The operation on arrays with one batch axis, on one device."""
    return _with_derivatives(operation, functools.partial(operation, {}))


@functools.lru_cache(maxsize=1024)
def _partitioned(operation: Operation):
    """The operation on arrays with one batch axis, left to XLA's partitioner."""

    # Under jit the constants of the program stay inside: custom_partitioning takes none.
    @custom_partitioning
    @jax.jit
    def call(*arrays):
        return operation({}, *arrays)

    def partition(mesh, arguments, results):
        del results
        axes = _axes_of(operation, [(x.sharding.spec, x.shape) for x in arguments], mesh.shape)

        def shardings(layouts):
            return tuple(NamedSharding(mesh, _spec(layout, axes)) for layout in layouts)

        local = functools.partial(operation, axes)
        return mesh, local, shardings(operation.outputs), shardings(operation.inputs)

    call.def_partition(partition, sharding_rule=_rule(operation))
    return _with_derivatives(operation, _under_vmap(operation, call))


@functools.lru_cache(maxsize=1024)
def _partitioned_by_names(operation: Operation):
    """The operation on arrays with one batch axis, split by the names of the ambient mesh's axes.

    Arrays that are elsewhere are moved: the values do not depend on the names.
    """

    def call(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            _hint()
            return operation({}, *arrays)
        spec = {"b": tuple(n for n in mesh.axis_names if n not in (*_TOKEN_AXES, *_HEAD_AXES))}
        spec |= {x: tuple(n for n in mesh.axis_names if n in _TOKEN_AXES) for x in "ts"}
        spec |= {x: tuple(n for n in mesh.axis_names if n in _HEAD_AXES) for x in "kh"}
        arguments = [
            (tuple(spec.get(letter) for letter in layout), x.shape)
            for layout, x in zip(operation.inputs, arrays, strict=True)
        ]
        axes = _axes_of(operation, arguments, mesh.shape)
        return _on_shards(operation, axes)(*arrays)

    return _with_derivatives(operation, call)


@functools.cache
def _hint() -> None:
    _logger.info(
        "several devices and no mesh: each of them runs attention on all of its arrays; "
        "jax.set_mesh(mesh) splits it over the axes of the mesh"
    )


def _on_shards(operation: Operation, axes: Axes):
    """The operation on each shard of the ambient mesh, as `axes` split its arrays."""
    return jax.shard_map(
        functools.partial(operation, axes),
        in_specs=tuple(_spec(layout, axes) for layout in operation.inputs),
        out_specs=tuple(_spec(layout, axes) for layout in operation.outputs),
        check_vma=False,
    )


def _rule(operation: Operation):
    """The sharding rule, once the shapes are known: heads may come in groups."""

    def rule(mesh, operands, results):
        del mesh
        sizes: dict[str, int] = {}
        for layout, x in zip(
            (*operation.inputs, *operation.outputs), (*operands, *results), strict=True
        ):
            sizes.update(zip(layout, x.shape, strict=True))
        groups = sizes.get("h", sizes["k"]) // max(sizes["k"], 1)
        heads = "k" if groups == 1 else "(k g)"

        def letters(layouts):
            return ", ".join(" ".join(heads if a == "h" else a for a in x) for x in layouts)

        # In the order of appearance, as the partitioner wants them.
        whole = dict.fromkeys("".join((*operation.inputs, *operation.outputs)).replace("h", "g"))
        whole = tuple(a for a in whole if a not in _SHARDED and (a != "g" or groups > 1))
        options: dict[str, Any] = {"need_replication_factors": whole}
        if groups > 1:
            options["g"] = groups
        return f"{letters(operation.inputs)} -> {letters(operation.outputs)}", options

    return rule


def _axes_of(operation: Operation, arguments: Sequence, mesh_shape: Mapping[str, int]) -> Axes:
    """Over which mesh axes each letter is sharded, from the first argument where it is.

    Args:
      operation: gives the letters.
      arguments: pairs of a PartitionSpec and a shape.
      mesh_shape: sizes of the mesh axes.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for layout, (spec, shape) in zip(operation.inputs, arguments, strict=True):
        for letter, names, size in zip(layout, spec, shape, strict=False):
            letter = "k" if letter == "h" else letter
            names = names if isinstance(names, tuple) else (names,) if names else ()
            parts = math.prod(mesh_shape[name] for name in names)
            # Shards must be equal, and no array may use a mesh axis twice (none has both t and s).
            others = [axes.get(x, ()) for x in ("b", "k", letter)]
            taken = {name for other in others for name in other}
            if letter in _SHARDED and size % parts == 0 and not taken & set(names):
                axes.setdefault(letter, names)
    return {letter: names for letter, names in axes.items() if names}


def _spec(layout: str, axes: Axes) -> P:
    return P(*(axes.get("k" if letter == "h" else letter) for letter in layout))


def _with_derivatives(operation: Operation, call):
    """`call`, an opaque way to run the operation, with the derivatives of its open form."""

    @jax.custom_vjp
    def differentiated(*arrays):
        return call(*arrays)

    def forward(*arrays):
        return call(*arrays), arrays

    def backward(arrays, cotangents):
        _, pull = jax.vjp(functools.partial(operation.differentiable(), {}), *arrays)
        return pull(cotangents)

    differentiated.defvjp(forward, backward)
    return differentiated


def _under_vmap(operation: Operation, call):
    """`call` on arrays with one batch axis, which a mapped axis joins."""

    @custom_vmap
    def mapped(*arrays):
        return call(*arrays)

    inputs_have_batch, outputs_have_batch = (
        ["b" in layout for layout in layouts] for layouts in (operation.inputs, operation.outputs)
    )

    @mapped.def_vmap
    def join_batch_axes(axis_size, in_batched, *arrays):
        every = (True,) * len(outputs_have_batch)
        pairs = zip(in_batched, inputs_have_batch, strict=True)
        if any(batched and not b for batched, b in pairs) or not all(outputs_have_batch):
            # What has no batch axis differs between the calls: they are made one after the other.
            return _one_by_one(mapped, axis_size, in_batched, arrays), every
        arrays = tuple(
            jnp.broadcast_to(x, (axis_size, *x.shape)) if b and not batched else x
            for x, b, batched in zip(arrays, inputs_have_batch, in_batched, strict=True)
        )
        batch = arrays[0].shape[:2]
        out = mapped(*_reshape_batch(operation.inputs, arrays, 2, (math.prod(batch),)))
        return _reshape_batch(operation.outputs, out, 1, batch), every

    return mapped


def _one_by_one(function, axis_size: int, in_batched, arrays):
    def call(index):
        return function(
            *(x[index] if batched else x for x, batched in zip(arrays, in_batched, strict=True))
        )

    return jax.lax.map(call, jnp.arange(axis_size))


def _run_explicit(operation: Operation, mesh, arrays):
    """On a mesh whose axes are in the types of the arrays: what is where is known here."""
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    extra = arrays[0].ndim - len(operation.inputs[0])
    if extra or not any(name for spec in specs for name in spec):
        return operation({}, *arrays)
    arguments = [(spec, x.shape) for spec, x in zip(specs, arrays, strict=True)]
    axes = _axes_of(operation, arguments, mesh.shape)
    in_specs = tuple(_spec(layout, axes) for layout in operation.inputs)
    arrays = tuple(jax.sharding.reshard(x, spec) for x, spec in zip(arrays, in_specs, strict=True))
    return _on_shards(operation, axes)(*arrays)
