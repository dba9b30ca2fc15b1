"""The options of a token statistics transformer: one frozen, validated record."""

import dataclasses
from collections.abc import Sequence

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.attention import AttentionKind
from cumulant_jax.models.layers.dropout import constant_rates, linear_rates
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.vision_options import VisionOptions

PATCH_SIZES = (2, 4, 8, 16)

#: Name of a drop-path schedule to the function from a probability and a depth to the blocks' own.
SCHEDULES = {"constant": constant_rates, "linear": linear_rates}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToSTOptions(VisionOptions):
    """What a `ToST` is made of: the options of `VisionOptions`, and these.

    The defaults are those of the published code, with its departures from its relatives: each has
    an option of its own (`update_patches`, `tokens_norm`, `drop_path_schedule`). The patch size is
    2, 4, 8 or 16, square; the image size is any, and matters for learned positions alone.

    Attributes:
      attention: as in `VisionOptions`; "tssa" by default. "xca" makes the model XCiT without its
        local patch interaction, "softmax" a ViT on the same skeleton.
      mlp_ratio: the MLPs' inner features are int(dim * mlp_ratio).
      position: "fourier" (sines of the grid through a learned linear map), "learned", "sincos2d"
        or "none".
      class_depth: number of class-attention blocks after the others, at least 1.
      tokens_norm: True, as published: the second norm of a class-attention block acts on all
        tokens. False: on the class token alone.
      update_patches: True, as published: a class-attention block changes the patches as well, to
        2 norm2(p + scale norm1(p)). False, as in CaiT: only the class token takes part in the
        residual sums.
      drop_path_schedule: "constant", as published: `drop_path` is the probability in every block.
        "linear", as in ViT: in the last; it rises from 0 in the first. Class-attention blocks have
        none.

    >>> ToSTOptions(image_size=(65, 96), dim=64, depth=2, heads=4).grid
    (5, 6)
    """

    dim: int = 192
    heads: int = 4
    layer_scale: float | None = 1.0
    attention: AttentionKind | Sequence[AttentionKind] = "tssa"
    mlp_ratio: float = 4.0
    position: str = "fourier"
    class_depth: int = 2
    tokens_norm: bool = True
    update_patches: bool = True
    drop_path_schedule: str = "constant"

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        self._check_mlp_ratio(self.mlp_ratio)
        self._check_position(self.position, POSITIONS)
        checks.check_count("class_depth", self.class_depth, least=1)
        self._settle_flags("tokens_norm", "update_patches")
        checks.check_name("drop_path_schedule", self.drop_path_schedule, SCHEDULES)
        self._check_stem()

    @property
    def patch(self) -> int:
        """The side of a patch in pixels."""
        return checks.size_pair("patch_size", self.patch_size)[0]

    def _check_stem(self) -> None:
        rows, columns = checks.size_pair("patch_size", self.patch_size)
        if rows != columns or rows not in PATCH_SIZES:
            known = ", ".join(map(str, PATCH_SIZES))
            raise ValueError(
                f"patch_size must be one of {known}, as the stem halves the image step by step; "
                f"got {self.patch_size}"
            )
        if self.dim % (rows // 2):
            raise ValueError(
                f"dim must be a multiple of {rows // 2} with patch_size {rows}, as each "
                f"convolution of the stem has half the features of the next; got {self.dim}"
            )
