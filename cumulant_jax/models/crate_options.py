"""The options of a white-box transformer (CRATE): one frozen, validated record."""

import dataclasses
from collections.abc import Sequence

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.attention import AttentionKind
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.vision_options import VisionOptions
from cumulant_jax.models.vit_options import POOLS


@dataclasses.dataclass(frozen=True, kw_only=True)
class CRATEOptions(VisionOptions):
    """What a `CRATE` is made of: the options of `VisionOptions`, and these.

    The defaults are those of the published code. The patch size divides the image size. `dropout`
    acts after the position embedding alone; `layer_scale` and `drop_path` (constant over the
    blocks) act on the attention branch, as the ISTA step is no residual branch.

    Attributes:
      attention: as in `VisionOptions`; "mssa" by default.
      step_size: of the ISTA step.
      sparsity: weight of the l1 norm in the ISTA step (the paper's lambda).
      pool: "token": the class token is what the head sees. "mean": the mean over all tokens, the
        class token included, as published.
      position: "learned", "sincos2d", "fourier" or "none".

    >>> CRATEOptions(image_size=32, patch_size=4, dim=64, depth=2, heads=4).grid
    (8, 8)
    """

    dim: int = 384
    heads: int = 6
    attention: AttentionKind | Sequence[AttentionKind] = "mssa"
    qkv_bias: bool = False
    eps: float = 1e-5
    step_size: float = 0.1
    sparsity: float = 0.1
    pool: str = "token"
    position: str = "learned"

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        self._check_divides_image()
        for name in ("step_size", "sparsity"):
            checks.check_number(name, getattr(self, name))
        checks.check_name("pool", self.pool, POOLS)
        self._check_position(self.position, POSITIONS)

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see: the patches and the class token."""
        return super().tokens + 1
