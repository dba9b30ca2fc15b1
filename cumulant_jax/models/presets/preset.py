"""What a preset is: a family of models and the options that a name stands for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of a family share: the record of their options and the module it makes."""

    options: type[Any]
    module: Callable[..., nnx.Module]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named model: its family and the options that differ from the family's defaults."""

    family: Family
    options: Mapping[str, Any]
