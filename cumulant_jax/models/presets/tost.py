"""The named token statistics transformers, and XCiT and ViT on their skeleton."""

from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.tost import ToST
from cumulant_jax.models.tost_options import ToSTOptions

_TOST = Family(ToSTOptions, ToST)
_ATTENTION = {"tost": "tssa", "xcit": "xca", "vit_cab": "softmax"}
_SIZES = {
    "tiny_12": {"dim": 192, "depth": 12, "heads": 4, "layer_scale": 1.0},
    "small_12": {"dim": 384, "depth": 12, "heads": 8, "layer_scale": 1.0},
    "tiny_24": {"dim": 192, "depth": 24, "heads": 4, "layer_scale": 1e-5},
    "small_24": {"dim": 384, "depth": 24, "heads": 8, "layer_scale": 1e-5},
    "medium_24": {"dim": 512, "depth": 24, "heads": 8, "layer_scale": 1e-5},
    "large_24": {"dim": 768, "depth": 24, "heads": 16, "layer_scale": 1e-5},
}
#: A name without a patch size is the model with patches of 16.
_PATCHES = {"": 16, "_p16": 16, "_p8": 8}

#: Name to preset.
TOST: dict[str, Preset] = {
    f"{family}_{size}{suffix}": Preset(
        _TOST, {"attention": attention, **shape, "patch_size": patch}
    )
    for family, attention in _ATTENTION.items()
    for size, shape in _SIZES.items()
    for suffix, patch in _PATCHES.items()
}
