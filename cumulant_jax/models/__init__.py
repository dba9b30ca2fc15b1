"""Models in Flax NNX, with any attention of this library in their blocks."""

from cumulant_jax.models.crate import CRATE
from cumulant_jax.models.crate_options import CRATEOptions
from cumulant_jax.models.generation import generate, left_pad
from cumulant_jax.models.language import DecodingState, LanguageModel
from cumulant_jax.models.language_options import LanguageModelOptions
from cumulant_jax.models.layers.attention import attention_kinds
from cumulant_jax.models.parameters import count_parameters, decays
from cumulant_jax.models.registry import create, list_models, options
from cumulant_jax.models.resizing import resize
from cumulant_jax.models.sequence import SequenceEncoder
from cumulant_jax.models.sequence_options import SequenceEncoderOptions
from cumulant_jax.models.summary import Summary, summary
from cumulant_jax.models.tost import ToST
from cumulant_jax.models.tost_options import ToSTOptions
from cumulant_jax.models.vit import ViT
from cumulant_jax.models.vit_options import ViTOptions
from cumulant_jax.models.vivit import ViViT
from cumulant_jax.models.vivit_from_vit import vivit_from_vit
from cumulant_jax.models.vivit_options import ViViTOptions

__all__ = [
    "CRATE",
    "CRATEOptions",
    "DecodingState",
    "LanguageModel",
    "LanguageModelOptions",
    "SequenceEncoder",
    "SequenceEncoderOptions",
    "Summary",
    "ToST",
    "ToSTOptions",
    "ViT",
    "ViTOptions",
    "ViViT",
    "ViViTOptions",
    "attention_kinds",
    "count_parameters",
    "create",
    "decays",
    "generate",
    "left_pad",
    "list_models",
    "options",
    "resize",
    "summary",
    "vivit_from_vit",
]
