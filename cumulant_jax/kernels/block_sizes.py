"""Block sizes as data: what was tuned for a kind of device.

The table `block_sizes.json` beside this file holds, per implementation and device kind, the sizes
that `python -m experiments.benchmark --tune` found best there. What it lacks has a safe default in
the implementation. A table of one's own, named by the environment variable
CUMULANT_JAX_BLOCK_SIZES, goes before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ENVIRONMENT_VARIABLE = "CUMULANT_JAX_BLOCK_SIZES"
TABLE = Path(__file__).with_suffix(".json")

Sizes = Mapping[str, int]

_NONE: Mapping[str, Sizes] = MappingProxyType({})
_trial: contextvars.ContextVar[Mapping[str, Sizes]] = contextvars.ContextVar("trial", default=_NONE)


def tuned(implementation: str, device_kind: str) -> Sizes:
    """The sizes that were tuned for a device, by name; empty where none were.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      device_kind: as `jax.Device.device_kind` has it.

    Raises:
      FileNotFoundError: the table that the environment variable names does not exist.
      ValueError: it is no table of block sizes.

    >>> dict(tuned("xla", "cpu"))
    {'chunk_bytes': 1572864}
    >>> dict(tuned("mosaic_tpu", "a chip that nobody tuned for"))
    {}
    """
    if implementation in _trial.get():
        return _trial.get()[implementation]
    own = os.environ.get(ENVIRONMENT_VARIABLE)
    if own:
        sizes = read_table(Path(own)).get(implementation, {}).get(device_kind)
        if sizes is not None:
            return sizes
    return read_table(TABLE).get(implementation, {}).get(device_kind, {})


@contextlib.contextmanager
def try_sizes(implementation: str, sizes: Sizes) -> Iterator[None]:
    """Traces with these sizes in place of the table's, for tuning.

    >>> with try_sizes("xla", {"chunk_bytes": 1 << 20}):
    ...     dict(tuned("xla", "cpu"))
    {'chunk_bytes': 1048576}
    """
    token = _trial.set({**_trial.get(), implementation: sizes})
    try:
        yield
    finally:
        _trial.reset(token)


@functools.cache
def read_table(path: Path) -> Mapping[str, Mapping[str, Sizes]]:
    """Reads a table: implementation, then device kind, then the sizes by name."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{ENVIRONMENT_VARIABLE} names a file that does not exist: {path}. Make one with "
            "`python -m experiments.benchmark --tune`, or unset the variable."
        )
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        for kinds in table.values():
            for sizes in kinds.values():
                if not all(type(n) is int and n > 0 for n in sizes.values()):
                    raise ValueError("sizes are positive whole numbers")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no table of block sizes: {error}") from error
    return table
