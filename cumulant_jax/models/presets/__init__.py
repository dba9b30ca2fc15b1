"""Named models, a file per family."""

from cumulant_jax.models.presets.crate import CRATE
from cumulant_jax.models.presets.language import LANGUAGE
from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.presets.sequence import SEQUENCE
from cumulant_jax.models.presets.tost import TOST
from cumulant_jax.models.presets.vit import VIT
from cumulant_jax.models.presets.vivit import VIVIT

#: Name to preset, over all families.
PRESETS: dict[str, Preset] = {**VIT, **TOST, **CRATE, **VIVIT, **LANGUAGE, **SEQUENCE}

__all__ = ["PRESETS", "Family", "Preset"]
