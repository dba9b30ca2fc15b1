"""The named video vision transformers: size, tubelet, factorisation."""

from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.vivit import ViViT
from cumulant_jax.models.vivit_options import ViViTOptions

_VIVIT = Family(ViViTOptions, ViViT)
_SIZES = {
    "nano": {"dim": 64, "depth": 3, "heads": 4},
    "ti": {"dim": 192, "depth": 12, "heads": 3},
    "s": {"dim": 384, "depth": 12, "heads": 6},
    "b": {"dim": 768, "depth": 12, "heads": 12},
    "l": {"dim": 1024, "depth": 24, "heads": 16},
}
_SUFFIXES = {"": "joint", "_fe": "encoder", "_fsa": "self_attention", "_fdp": "dot_product"}

#: Name to preset. The dot product is factorised over an even number of heads alone.
VIVIT: dict[str, Preset] = {
    f"vivit_{size}16x2{suffix}": Preset(
        _VIVIT,
        {**shape, "patch_size": 16, "tubelet_frames": 2, "factorisation": factorisation},
    )
    for suffix, factorisation in _SUFFIXES.items()
    for size, shape in _SIZES.items()
    if factorisation != "dot_product" or shape["heads"] % 2 == 0
}
