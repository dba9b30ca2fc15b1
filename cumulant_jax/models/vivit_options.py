"""The options of a video vision transformer: one frozen, validated record."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.attention import AttentionKind
from cumulant_jax.models.layers.mlp import GELUS
from cumulant_jax.models.layers.positions import LearnedPositions, NoPositions
from cumulant_jax.models.layers.space_time import RepeatedPositions
from cumulant_jax.models.transformer_options import TransformerOptions
from cumulant_jax.models.vision_options import VisionOptions
from cumulant_jax.models.vit_options import POOLS

#: Published ways to attend over space and time; the paper numbers them 1 to 4 in this order.
FACTORISATIONS = ("joint", "encoder", "self_attention", "dot_product")

#: Name of a position embedding to its module.
VIDEO_POSITIONS: dict[str, type] = {
    "learned": LearnedPositions,
    "learned2d": RepeatedPositions,
    "none": NoPositions,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViViTOptions(VisionOptions):
    """What a `ViViT` is made of: the options of `VisionOptions`, and these.

    The patch size divides the image size. `drop_path` is the probability in the last block; it
    rises linearly from 0 in the first.

    Attributes:
      frames: of a clip.
      tubelet_frames: frames of a tubelet; divides `frames`.
      factorisation: "joint": all tokens attend to each other. "encoder": a transformer over the
        tokens of each frame, then one over the frames. "self_attention": attention over space and
        attention over time in each block. "dot_product": half of the heads attend over time, half
        over space.
      temporal_depth: blocks of the transformer over the frames, with factorisation="encoder".
      temporal_attention: the kind (or one for each block) of the attention over time, with
        "encoder" and "self_attention"; None: that of `attention`.
      temporal_attention_options: as `attention_options`, for `temporal_attention`; None: those of
        `attention_options`.
      pool: "token": the class token is what the head sees. "mean": the mean over the tokens, and
        there is no class token. None: "token" with "joint" and "encoder", and "mean" with the
        others, which have no place for a class token.
      position: "learned": a vector for each place in space and time. "learned2d": one for each
        place in space, the same in all frames. "none". With "encoder" the first two are the same:
        a table over space and one over time.
      mlp_ratio: the MLPs' inner features are int(dim * mlp_ratio).
      gelu: "tanh", as published, or "erf".

    >>> ViViTOptions(frames=32, image_size=224, patch_size=16).grid
    (16, 14, 14)
    """

    num_classes: int = 400
    frames: int = 32
    tubelet_frames: int = 2
    factorisation: str = "joint"
    temporal_depth: int = 4
    temporal_attention: AttentionKind | Sequence[AttentionKind] | None = None
    temporal_attention_options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = (
        dataclasses.field(default=None, hash=False)
    )
    pool: str | None = None
    position: str = "learned"
    mlp_ratio: float = 4.0
    gelu: str = "tanh"

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        for name in ("frames", "tubelet_frames", "temporal_depth"):
            checks.check_count(name, getattr(self, name), least=1)
        super().__post_init__()
        self._check_mlp_ratio(self.mlp_ratio)
        self._check_divides_image()
        if self.frames % self.tubelet_frames:
            raise ValueError(
                f"frames must be a multiple of tubelet_frames, got {self.frames} and "
                f"{self.tubelet_frames}"
            )
        checks.check_name("gelu", self.gelu, GELUS)
        checks.check_name("position", self.position, VIDEO_POSITIONS)
        checks.check_name("factorisation", self.factorisation, FACTORISATIONS)
        self._settle_pooling()
        self._settle_temporal()

    @property
    def tubelet(self) -> tuple[int, int, int]:
        """(frames, height, width) of a tubelet."""
        return (self.tubelet_frames, *checks.size_pair("patch_size", self.patch_size))

    @property
    def grid(self) -> tuple[int, ...]:
        """(frames, rows, columns) of tokens."""
        return (self.frames // self.tubelet_frames, *super().grid)

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and type of an input with one example."""
        size = checks.size_pair("image_size", self.image_size)
        return jax.ShapeDtypeStruct((1, self.frames, *size, self.channels), jnp.dtype("float32"))

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see; those of a frame with factorisation="encoder"."""
        grid = self.grid[1:] if self.factorisation == "encoder" else self.grid
        return math.prod(grid) + (self.pool == "token")

    @property
    def temporal(self) -> TransformerOptions:
        """What the attention over time is made of, block by block."""
        own = {field.name: getattr(self, field.name) for field in _SHARED_FIELDS}
        if self.factorisation == "encoder":
            own["depth"] = self.temporal_depth
        for name in ("attention", "attention_options"):
            if getattr(self, f"temporal_{name}") is not None:
                own[name] = getattr(self, f"temporal_{name}")
        return TransformerOptions(**own)

    def _settle_pooling(self) -> None:
        has_token = self.factorisation in ("joint", "encoder")
        if self.pool is None:
            self._store("pool", "token" if has_token else "mean")
        checks.check_name("pool", self.pool, POOLS)
        if self.pool == "token" and not has_token:
            raise ValueError(
                f"pool must be 'mean' with factorisation={self.factorisation!r}, whose tokens are "
                "a grid with no place for a class token; got pool='token'"
            )
        if self.factorisation == "dot_product" and self.heads % 2:
            raise ValueError(
                f"heads must be even with factorisation='dot_product', got {self.heads}: half of "
                "them attend over time"
            )

    def _settle_temporal(self) -> None:
        named = [
            name
            for name in ("temporal_attention", "temporal_attention_options")
            if getattr(self, name) is not None
        ]
        if self.factorisation in ("joint", "dot_product"):
            if named:
                raise ValueError(
                    f"{named[0]} must be None with factorisation={self.factorisation!r}, which has "
                    "no layers of its own for time"
                )
            return
        for name in ("attention", "attention_options"):
            own, temporal = getattr(self, name), getattr(self, f"temporal_{name}")
            if self.factorisation == "encoder" and temporal is None and isinstance(own, tuple):
                raise ValueError(
                    f"temporal_{name} must say what the {self.temporal_depth} blocks over time "
                    f"have, as {name} has an entry for each block over space; got None"
                )
        settled = self.temporal
        for name in named:
            self._store(name, getattr(settled, name.removeprefix("temporal_")))


_SHARED_FIELDS = dataclasses.fields(TransformerOptions)
