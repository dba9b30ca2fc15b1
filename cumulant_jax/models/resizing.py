"""Models for inputs of another size than they were made for."""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from cumulant_jax.models.layers.positions import LearnedPositions, resize_positions
from cumulant_jax.naming import unknown_name

_TABLE = "position_embedding"


def resize(model: nnx.Module, **sizes: Any) -> nnx.Module:
    """Makes the same model for inputs of another size.

    Learned position tables are resized to the new grid, bicubic and with antialiasing (see
    `resize_positions`); a table of the same grid, and every other array, is the model's own.
    Models whose positions are computed from the grid ("fourier", "sincos2d", "none") take any size
    as they are.

    Args:
      model: of this library.
      **sizes: the options that say how large an input is, such as image_size=(256, 384).

    Returns:
      A model whose options have these sizes. The given one keeps its own.

    Raises:
      ValueError: the model has no such option, or the option changes more than position tables.
      TypeError: not a model of this library.

    >>> from cumulant_jax import models
    >>> model = models.create("vit_nano4", image_size=32, rngs=nnx.Rngs(0))
    >>> model.positions.position_embedding.shape
    (1, 65, 64)
    >>> resize(model, image_size=(48, 32)).positions.position_embedding.shape
    (1, 97, 64)
    """
    options: Any = getattr(model, "options", None)
    if not isinstance(model, nnx.Module) or not dataclasses.is_dataclass(options):
        raise TypeError(f"model must be a model of cumulant_jax.models, got {type(model).__name__}")
    known = [field.name for field in dataclasses.fields(options)]
    for name in sizes:
        if name not in known:
            raise ValueError(unknown_name(f"option of {type(model).__name__}", name, known))
    options = dataclasses.replace(options, **sizes)  # pyright: ignore[reportArgumentType]
    build: Any = type(model)
    target = nnx.eval_shape(lambda: build(options, rngs=nnx.Rngs(0)))
    grids = _grids(model)
    state = {}
    for path, old in nnx.to_flat_state(nnx.state(model)):
        value = old[...]
        if path[:-1] in grids and path[-1] == _TABLE:
            value = _resized(value, grids[path[:-1]], _grids(target)[path[:-1]])
        state[path] = old.replace(value)
    graphdef, abstract = nnx.split(target)
    expected = {path: leaf.shape for path, leaf in nnx.to_flat_state(abstract)}
    changed = {
        ".".join(map(str, path))
        for path in {*state, *expected}
        if path not in state or state[path].shape != expected.get(path)
    }
    if changed:
        given = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        raise ValueError(
            f"{given} changes arrays that cannot be resized: {', '.join(sorted(changed)[:3])}; "
            "give only options that say how large an input is, such as image_size"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(state))


def _grids(model: Any) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The grid of every learned position table, by the path of its module."""
    return {
        path: module.grid
        for path, module in nnx.iter_modules(model)
        if isinstance(module, LearnedPositions)
    }


def _resized(table: jax.Array, old: tuple[int, ...], new: tuple[int, ...]) -> jax.Array:
    prefix_tokens = table.shape[1] - math.prod(old)
    return resize_positions(table, old_grid=old, new_grid=new, prefix_tokens=prefix_tokens)
