"""The options of a vision transformer: one frozen, validated record."""

import dataclasses

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.vision_options import VisionOptions

POOLS = ("token", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(VisionOptions):
    """What a `ViT` is made of: the options of `VisionOptions`, and these.

    The patch size divides the image size. `drop_path` is the probability in the last block; it
    rises linearly from 0 in the first.

    Attributes:
      mlp_ratio: the MLP's inner features are int(dim * mlp_ratio).
      pool: "token": the class token is what the head sees. "mean": the mean over the patches
        (never the class token).
      class_token: whether there is one; None: only with pool="token", which needs it.
      fc_norm: True: the final norm acts on the pooled features. False: on all tokens, before
        pooling. None, as in timm: True for pool="mean", False for pool="token" (where both are
        the same function).
      position: "learned", "sincos2d" (fixed), "fourier" (ToST's) or "none".

    >>> ViTOptions(image_size=32, patch_size=4, dim=64, depth=2, heads=4).grid
    (8, 8)
    """

    mlp_ratio: float = 4.0
    pool: str = "token"
    class_token: bool | None = None
    fc_norm: bool | None = None
    position: str = "learned"

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        self._check_mlp_ratio(self.mlp_ratio)
        self._check_divides_image()
        checks.check_name("pool", self.pool, POOLS)
        self._check_position(self.position, POSITIONS)
        self._settle_pooling()

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see: the patches, and the class token."""
        return super().tokens + bool(self.class_token)

    def _settle_pooling(self) -> None:
        if self.class_token is None:
            self._store("class_token", self.pool == "token")
        if self.fc_norm is None:
            self._store("fc_norm", self.pool == "mean")
        self._settle_flags("class_token", "fc_norm")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool must be 'mean' when class_token is False, got pool='token'")
