"""What the options of all models have in common: one frozen, validated record."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.attention import OWN_PROJECTIONS, AttentionKind
from cumulant_jax.models.layers.block import REMAT_POLICIES
from cumulant_jax.models.layers.norms import QK_NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """The options that every model takes; each family's record adds its own.

    Attributes:
      dim: features of a token.
      depth: number of blocks.
      heads: number of heads, a divisor of `dim`.
      attention: a name of `attention_kinds()`, a function of the attention signature (query, key,
        value, **options), or a list of `depth` of those, one for each block, which makes a hybrid.
      attention_options: keyword arguments for the attention function of every block, or a list of
        `depth` such mappings (or None). Their values must be hashable.
      qkv_bias: whether the projection to query, key and value has a bias.
      qk_norm: None, "layer" or "rms", on each head's queries and keys.
      query_scale: where the learned factor per head on the queries starts; None leaves it out.
      layer_scale: where LayerScale starts; None leaves it out.
      dropout: dropout rate after the position embedding and in the feed-forward halves.
      projection_dropout: dropout rate after the output projection of the attention layers.
      drop_path: the probability of dropping a branch, see the family's record.
      remat: recompute each block in the backward pass instead of keeping what is inside it: False,
        True or "full" for all of it, "dots" for all but the results of its linear layers.
      dtype: dtype of the computation, such as "bfloat16"; the head and the logits are float32 at
        least.
      param_dtype: dtype of the parameters.
      eps: epsilon of every layer norm.

    In a hybrid, `qk_norm` and `query_scale` act on the blocks that have queries of their own;
    where none has ("tssa", "xca", "mssa"), asking for them is an error.

    >>> TransformerOptions(depth=2, attention=["tssa", "softmax"]).attention_per_block
    ('tssa', 'softmax')
    """

    dim: int = 768
    depth: int = 12
    heads: int = 12
    attention: AttentionKind | Sequence[AttentionKind] = "softmax"
    attention_options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] = dataclasses.field(
        default_factory=dict, hash=False
    )
    qkv_bias: bool = True
    qk_norm: str | None = None
    query_scale: float | None = None
    layer_scale: float | None = None
    dropout: float = 0.0
    projection_dropout: float = 0.0
    drop_path: float = 0.0
    remat: bool | str = False
    dtype: Any = "float32"
    param_dtype: Any = "float32"
    eps: float = 1e-6

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        self._check_numbers()
        self._settle_flags("qkv_bias")
        if isinstance(self.remat, str):
            checks.check_name("remat", self.remat, REMAT_POLICIES)
        else:
            self._settle_flags("remat")
        for name in ("dtype", "param_dtype"):
            self._store(name, checks.dtype_name(name, getattr(self, name)))
        if self.dim % self.heads:
            raise ValueError(
                f"dim must be a multiple of heads, got dim={self.dim} and heads={self.heads}"
            )
        self._settle_attention()

    @property
    def attention_per_block(self) -> tuple[AttentionKind, ...]:
        """The attention kind of each block."""
        value: Any = self.attention
        return value if isinstance(value, tuple) else (value,) * self.depth

    @property
    def attention_options_per_block(self) -> tuple[Mapping[str, Any], ...]:
        """The attention options of each block."""
        value: Any = self.attention_options
        return value if isinstance(value, tuple) else (value,) * self.depth

    @property
    def drop_rates(self) -> dict[str, float]:
        """The rates that need a key in training."""
        return {
            name: getattr(self, name) for name in ("dropout", "projection_dropout", "drop_path")
        }

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in ("dim", "depth", "heads"):
            checks.check_count(name, getattr(self, name), least=1)
        for name, rate in self.drop_rates.items():
            checks.check_number(name, rate, below=1.0)
        checks.check_number("eps", self.eps)
        for name in ("query_scale", "layer_scale"):
            if getattr(self, name) is not None:
                checks.check_number(name, getattr(self, name))

    def _settle_flags(self, *names: str) -> None:
        for name in names:
            checks.check_flag(name, getattr(self, name))
            self._store(name, bool(getattr(self, name)))

    def _check_mlp_ratio(self, ratio: float) -> None:
        checks.check_number("mlp_ratio", ratio)
        if int(self.dim * ratio) < 1:
            raise ValueError(f"mlp_ratio must leave the MLP a feature, got {ratio}")

    def _settle_attention(self) -> None:
        self._store("attention", checks.per_block("attention", self.attention, self.depth))
        for kind in self.attention_per_block:
            checks.check_attention(kind)
        options: Any = checks.per_block("attention_options", self.attention_options, self.depth)
        if isinstance(options, tuple):
            entries = (checks.options_mapping("attention_options", entry) for entry in options)
            self._store("attention_options", tuple(entries))
        else:
            self._store("attention_options", checks.options_mapping("attention_options", options))
        pairs = zip(self.attention_per_block, self.attention_options_per_block, strict=True)
        for kind, entry in pairs:
            checks.check_attention_options(kind, entry)
        self._check_query_options()

    def _check_query_options(self) -> None:
        if self.qk_norm is not None:
            checks.check_name("qk_norm", self.qk_norm, QK_NORMS)
        kinds = self.attention_per_block
        if not all(isinstance(kind, str) and kind in OWN_PROJECTIONS for kind in kinds):
            return
        for name in ("qk_norm", "query_scale"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be None with attention={self.attention!r}, which has no "
                    f"queries of its own to normalise or scale; got {getattr(self, name)!r}"
                )
