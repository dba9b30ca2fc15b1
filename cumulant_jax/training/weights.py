"""Plain weights in a safetensors file: names and arrays, for other programs to read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cumulant_jax.training.mesh import path_name


def save_weights(
    file: str | os.PathLike,
    params: Mapping[str, Any],
    model_state: Mapping[str, Any] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes parameters, and the model's other variables, into a safetensors file.

    The file appears under its name only when it is whole.

    Args:
      file: where to.
      params: nested dicts of arrays; each is named by its path, "blocks.0.mlp.expand.kernel".
      model_state: likewise, such as the running statistics of batch norm.
      metadata: texts that the file holds beside the arrays.

    Raises:
      ValueError: two arrays have one name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_weights(f"{directory}/w.safetensors", {"head": {"bias": np.zeros(3)}})
    ...     load_weights(f"{directory}/w.safetensors")
    {'head': {'bias': array([0., 0., 0.])}}
    """
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for tree in (params, model_state or {}):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = path_name(path).replace("/", ".")
            if name in arrays:
                raise ValueError(f"model_state: {name} is among the parameters too.")
            # Safetensors writes the memory as it lies.
            arrays[name] = np.ascontiguousarray(jax.device_get(leaf))
    target = Path(file)
    temporary = target.with_name(f".{target.name}.tmp")
    save_file(arrays, temporary, metadata=dict(metadata or {}))
    os.replace(temporary, target)


def load_weights(file: str | os.PathLike) -> dict[str, Any]:
    """Reads a file of `save_weights`.

    Returns:
      Nested dicts of arrays, parameters and other variables together; digits are ints again, as in
      NNX's pure dicts.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"file: {os.fspath(file)!r} cannot be read: {error}") from error
    tree: dict[Any, Any] = {}
    for name, array in arrays.items():
        *sections, leaf = (int(part) if part.isdecimal() else part for part in name.split("."))
        section = tree
        for key in sections:
            section = section.setdefault(key, {})
        section[leaf] = array
    return tree
