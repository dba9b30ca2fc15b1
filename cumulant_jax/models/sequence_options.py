"""The options of an encoder for long sequences: one frozen, validated record."""

import dataclasses

import jax
import jax.numpy as jnp

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.mlp import GELUS
from cumulant_jax.models.layers.pair import INTERACTIONS
from cumulant_jax.models.layers.sequence_positions import SEQUENCE_POSITIONS
from cumulant_jax.models.transformer_options import TransformerOptions
from cumulant_jax.models.vit_options import POOLS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceEncoderOptions(TransformerOptions):
    """What a `SequenceEncoder` is made of: the options of `TransformerOptions`, and these.

    `drop_path` is the probability in the last block; it rises linearly from 0 in the first.

    Attributes:
      num_classes: classes of the head; 0 leaves the head out and the model returns its features.
      vocab_size: number of different tokens; None where the inputs are numbers.
      input_features: numbers at each place of the sequence, such as 1 for grey pixels, which a
        linear map embeds; None where the inputs are tokens.
      max_tokens: the longest sequence.
      position: "learned", "sincos" (fixed) or "none".
      pool: "token": a class token, put before the sequence, is what the head sees. "mean": the mean
        over the tokens, without padding.
      pairs: whether an example is a pair of sequences, each encoded by itself, which only the head
        compares.
      interaction: what the head of pairs sees. "concat": both features. "nli": also their product
        and difference.
      head_dim: features inside the head, a MLP with ReLU; None: the head is one linear map.
      mlp_ratio: the MLPs' inner features are int(dim * mlp_ratio).
      gelu: "tanh", as published, or "erf".

    >>> SequenceEncoderOptions(vocab_size=256, max_tokens=1024, pool="token").tokens
    1025
    """

    num_classes: int = 10
    vocab_size: int | None = None
    input_features: int | None = None
    max_tokens: int = 1024
    position: str = "learned"
    pool: str = "mean"
    pairs: bool = False
    interaction: str = "concat"
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    gelu: str = "tanh"

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        checks.check_count("num_classes", self.num_classes, least=0)
        checks.check_count("max_tokens", self.max_tokens, least=1)
        for name in ("vocab_size", "input_features", "head_dim"):
            if getattr(self, name) is not None:
                checks.check_count(name, getattr(self, name), least=1)
        if (self.vocab_size is None) == (self.input_features is None):
            raise ValueError(
                "one of vocab_size (for tokens) and input_features (for numbers) must be given; "
                f"got vocab_size={self.vocab_size} and input_features={self.input_features}"
            )
        self._settle_flags("pairs")
        self._check_mlp_ratio(self.mlp_ratio)
        checks.check_name("gelu", self.gelu, GELUS)
        checks.check_name("pool", self.pool, POOLS)
        checks.check_name("interaction", self.interaction, INTERACTIONS)
        checks.check_name("position", self.position, SEQUENCE_POSITIONS)
        if self.position == "sincos" and self.dim % 2:
            raise ValueError(f"dim must be even with position='sincos', got {self.dim}")

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and type of an input with one example."""
        shape = (1, *([2] if self.pairs else []), self.max_tokens)
        if self.input_features is None:
            return jax.ShapeDtypeStruct(shape, jnp.dtype("int32"))
        return jax.ShapeDtypeStruct((*shape, self.input_features), jnp.dtype("float32"))

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see: the sequence, and the class token."""
        return self.max_tokens + (self.pool == "token")
