"""The named white-box transformers, as published: patches of 16."""

from cumulant_jax.models.crate import CRATE as _CRATE
from cumulant_jax.models.crate_options import CRATEOptions
from cumulant_jax.models.presets.preset import Family, Preset

_SIZES = {
    "tiny": {"dim": 384, "depth": 12, "heads": 6},
    "small": {"dim": 576, "depth": 12, "heads": 12},
    "base": {"dim": 768, "depth": 12, "heads": 12},
    "large": {"dim": 1024, "depth": 24, "heads": 16},
}

#: Name to preset.
CRATE: dict[str, Preset] = {
    f"crate_{size}": Preset(Family(CRATEOptions, _CRATE), shape) for size, shape in _SIZES.items()
}
