"""Named models, a file per family."""

from cumulant_jax.models.presets.language import LANGUAGE
from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.presets.vit import VIT

#: Name to preset, over all families.
PRESETS: dict[str, Preset] = {**VIT, **LANGUAGE}

__all__ = ["PRESETS", "Family", "Preset"]
