"""Named models: how a name becomes a module."""

import dataclasses
import difflib
import fnmatch
from typing import Any

from flax import nnx

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.presets import PRESETS, Preset
from cumulant_jax.naming import unknown_name


def list_models(pattern: str = "*") -> list[str]:
    """The names that `create` takes.

    Args:
      pattern: a shell pattern; names that do not match are left out.

    Returns:
      Names, small models first within a family.

    >>> list_models("vit_?16")
    ['vit_s16', 'vit_b16', 'vit_l16']
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a shell pattern such as 'vit_s*', got {pattern!r}")
    return [name for name in PRESETS if fnmatch.fnmatchcase(name, pattern)]


def options(name: str) -> dict[str, Any]:
    """What a name stands for: every option of the model, each of which `create` can override.

    Args:
      name: one of `list_models()`.

    Returns:
      Options by name; the family's record (for ViT: `ViTOptions`) says what each means.

    Raises:
      ValueError: no model has this name.
      TypeError: the name is no text.

    >>> resolved = options("vit_s16")
    >>> resolved["dim"], resolved["depth"], resolved["heads"], resolved["patch_size"]
    (384, 12, 6, (16, 16))
    """
    preset = _preset(name)
    record = preset.family.options(**preset.options)
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def create(name: str, *, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """Creates a model by name.

    Args:
      name: one of `list_models()`, such as "vit_s16": family, size, patch size.
      rngs: the keys of the initialisation, such as nnx.Rngs(0).
      **options: override the preset's: `attention`, `num_classes`, `image_size`, ..., see
        `options(name)` for all and `ViTOptions` for their meaning.

    Returns:
      A module, called as model(inputs, train=False, rng=None, return_intermediates=False), where
      inputs are images, clips or tokens.

    Raises:
      ValueError: an unknown model, an unknown option or an impossible value; the message names the
        nearest valid one.
      TypeError: an option, or `rngs`, of the wrong kind.

    >>> import jax.numpy as jnp
    >>> model = create("vit_nano2", attention="cumulant3", image_size=8, channels=1,
    ...                num_classes=10, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8, 8, 1))).shape
    (2, 10)
    """
    preset = _preset(name)
    checks.check_rngs(rngs)
    known = [field.name for field in dataclasses.fields(preset.family.options)]
    for option in options:
        if option not in known:
            raise ValueError(unknown_name(f"option of model {name!r}", option, known))
    record = preset.family.options(**{**preset.options, **options})
    return preset.family.module(record, rngs=rngs)


def _preset(name: str) -> Preset:
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a model, such as 'vit_s16', got {name!r}")
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown model {name!r};{hint} All names: cumulant_jax.models.list_models()."
        )
    return PRESETS[name]
