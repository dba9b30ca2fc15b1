"""The options of a causal language model: one frozen, validated record."""

import dataclasses

import jax
import jax.numpy as jnp

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.sequence_positions import SEQUENCE_POSITIONS
from cumulant_jax.models.transformer_options import TransformerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(TransformerOptions):
    """What a `LanguageModel` is made of: the options of `TransformerOptions`, and these.

    The defaults are those of the published ToST language models: no biases, LayerScale at 1e-5,
    epsilon 1e-5. Any causal kind can be the `attention`; "xca" is none. `drop_path` is the
    probability in the last block; it rises linearly from 0 in the first.

    Attributes:
      vocab_size: number of different tokens.
      block_size: the longest sequence, prompt and generated tokens together.
      position: "learned", "sincos" (fixed) or "none".
      mlp_ratio: the MLP's inner features are int(dim * mlp_ratio).
      bias: whether the norms and the linear layers other than the projection to query, key and
        value have biases.

    >>> LanguageModelOptions(attention="xca")
    Traceback (most recent call last):
      ...
    ValueError: attention 'xca' has no causal form: ...
    """

    vocab_size: int = 50304
    block_size: int = 1024
    position: str = "learned"
    mlp_ratio: float = 4.0
    bias: bool = False
    qkv_bias: bool = False
    layer_scale: float | None = 1e-5
    eps: float = 1e-5

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        self._check_mlp_ratio(self.mlp_ratio)
        self._settle_flags("bias")
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

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and type of an input with one example."""
        return jax.ShapeDtypeStruct((1, self.block_size), jnp.dtype("int32"))

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see."""
        return self.block_size
