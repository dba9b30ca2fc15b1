"""The named vision transformers: size and patch size."""

from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.vit import ViT
from cumulant_jax.models.vit_options import ViTOptions

_VIT = Family(ViTOptions, ViT)
_SIZES = {
    "nano": {"dim": 64, "depth": 3, "heads": 4},
    "ti": {"dim": 192, "depth": 12, "heads": 3},
    "s": {"dim": 384, "depth": 12, "heads": 6},
    "b": {"dim": 768, "depth": 12, "heads": 12},
    "l": {"dim": 1024, "depth": 24, "heads": 16},
}
_PATCHES = (1, 2, 4, 8, 14, 16, 32)

#: Name to preset.
VIT: dict[str, Preset] = {
    f"vit_{size}{patch}": Preset(_VIT, {**shape, "patch_size": patch})
    for size, shape in _SIZES.items()
    for patch in _PATCHES
}
