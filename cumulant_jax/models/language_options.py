"""The options of a causal language model: one frozen, validated record."""

import dataclasses

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.sequence_positions import SEQUENCE_POSITIONS
from cumulant_jax.models.transformer_options import TransformerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(TransformerOptions):
    """What a `LanguageModel` is made of, besides what `TransformerOptions` says of its blocks.

    The defaults are those of the published ToST language models: no biases, LayerScale at 1e-5,
    epsilon 1e-5. Any causal kind can be the `attention`; "xca" is none.

    Attributes:
      vocab_size: number of different tokens.
      block_size: the longest sequence, prompt and generated tokens together.
      position: "learned", "sincos" (fixed) or "none".

    >>> LanguageModelOptions(attention="xca")
    Traceback (most recent call last):
      ...
    ValueError: attention 'xca' has no causal form: ...
    """

    vocab_size: int = 50304
    block_size: int = 1024
    position: str = "learned"
    qkv_bias: bool = False
    bias: bool = False
    layer_scale: float | None = 1e-5
    eps: float = 1e-5

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        for name in ("vocab_size", "block_size"):
            checks.check_count(name, getattr(self, name), least=1)
        checks.check_name("position", self.position, SEQUENCE_POSITIONS)
        if self.position == "sincos" and self.dim % 2:
            raise ValueError(f"dim must be even with position='sincos', got {self.dim}")
        if "xca" in self.attention_per_block:
            raise ValueError(
                "attention 'xca' has no causal form: its features attend to each other over all "
                "tokens; use another of cumulant_jax.models.attention_kinds()"
            )
