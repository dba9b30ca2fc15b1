"""The named language models: ToST's causal models and the softmax baseline on the same skeleton."""

from cumulant_jax.models.language import LanguageModel
from cumulant_jax.models.language_options import LanguageModelOptions
from cumulant_jax.models.presets.preset import Family, Preset

_LANGUAGE = Family(LanguageModelOptions, LanguageModel)
_SIZES = {
    "nano": {"dim": 64, "depth": 3, "heads": 4},
    "base": {"dim": 768, "depth": 12, "heads": 12},
    "medium": {"dim": 1024, "depth": 24, "heads": 16},
    "large": {"dim": 1280, "depth": 36, "heads": 20},
}
_ATTENTION = {"tost_lm": "tssa", "gpt": "softmax"}

#: Name to preset.
LANGUAGE: dict[str, Preset] = {
    f"{family}_{size}": Preset(_LANGUAGE, {**shape, "attention": attention})
    for family, attention in _ATTENTION.items()
    for size, shape in _SIZES.items()
}
