"""The named sequence encoders: one for each task of the Long Range Arena.

Sizes are those of the published Transformer baseline (google-research/long-range-arena, the
transformer_base configurations; the text task at the paper's 4,000 bytes). Three things there have
no counterpart here: list operations share one block's weights among all six, the pathfinder's
queries, keys and values have half the features of a token (here all of them), and the output
projections have no bias.
"""

from typing import Any

from cumulant_jax.models.presets.preset import Family, Preset
from cumulant_jax.models.sequence import SequenceEncoder
from cumulant_jax.models.sequence_options import SequenceEncoderOptions

_SEQUENCE = Family(SequenceEncoderOptions, SequenceEncoder)
_BYTES = 257  # and padding
_TASKS: dict[str, dict[str, Any]] = {
    # Ten digits, four operators, three kinds of bracket, padding.
    "listops": {
        "dim": 512,
        "depth": 6,
        "heads": 8,
        "head_dim": 2048,
        "pool": "token",
        "vocab_size": 18,
        "max_tokens": 2000,
        "num_classes": 10,
    },
    "text": {
        "dim": 256,
        "depth": 4,
        "heads": 4,
        "head_dim": 1024,
        "pool": "token",
        "vocab_size": _BYTES,
        "max_tokens": 4000,
        "num_classes": 2,
    },
    "retrieval": {
        "dim": 128,
        "depth": 4,
        "heads": 4,
        "head_dim": 512,
        "pool": "token",
        "pairs": True,
        "vocab_size": _BYTES,
        "max_tokens": 4000,
        "num_classes": 2,
    },
    "image": {
        "dim": 32,
        "depth": 1,
        "heads": 1,
        "head_dim": 64,
        "pool": "token",
        "mlp_ratio": 2.0,
        "vocab_size": 256,
        "max_tokens": 1024,
        "num_classes": 10,
        "position": "learned",
    },
    "pathfinder": {
        "dim": 128,
        "depth": 1,
        "heads": 4,
        "head_dim": 128,
        "pool": "mean",
        "mlp_ratio": 1.0,
        "vocab_size": 256,
        "max_tokens": 1024,
        "num_classes": 2,
    },
}

#: Name to preset.
SEQUENCE: dict[str, Preset] = {
    f"lra_{task}": Preset(_SEQUENCE, {"qkv_bias": False, "position": "sincos", **options})
    for task, options in _TASKS.items()
}
