"""The options of a vision transformer: one frozen, validated record."""

import dataclasses

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.transformer_options import TransformerOptions

POOLS = ("token", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTOptions(TransformerOptions):
    """What a `ViT` is made of, besides what `TransformerOptions` says of its blocks.

    Attributes:
      num_classes: classes of the head; 0 leaves the head out and the model returns its features.
      image_size: (height, width) in pixels, or one number for both.
      patch_size: (height, width) in pixels, or one number for both; divides the image size.
      channels: channels of the images.
      pool: "token": the class token is what the head sees. "mean": the mean over the patches
        (never the class token).
      class_token: whether there is one; None: only with pool="token", which needs it.
      fc_norm: True: the final norm acts on the pooled features. False: on all tokens, before
        pooling. None, as in timm: True for pool="mean", False for pool="token" (where both are
        the same function).
      position: "learned", "sincos2d" (fixed) or "none".

    >>> ViTOptions(image_size=32, patch_size=4, dim=64, depth=2, heads=4).grid
    (8, 8)
    """

    num_classes: int = 1000
    image_size: checks.Size = 224
    patch_size: checks.Size = 16
    channels: int = 3
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
        checks.check_count("num_classes", self.num_classes, least=0)
        checks.check_count("channels", self.channels, least=1)
        super().__post_init__()
        for name in ("image_size", "patch_size"):
            self._store(name, checks.size_pair(name, getattr(self, name)))
        checks.check_name("pool", self.pool, POOLS)
        checks.check_name("position", self.position, POSITIONS)
        self._check_divisors()
        self._settle_pooling()

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        height, width = checks.size_pair("image_size", self.image_size)
        rows, columns = checks.size_pair("patch_size", self.patch_size)
        return height // rows, width // columns

    def _check_divisors(self) -> None:
        image = checks.size_pair("image_size", self.image_size)
        patch = checks.size_pair("patch_size", self.patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(f"image_size {image} must be a multiple of patch_size {patch}")
        if self.position == "sincos2d" and self.dim % 4:
            raise ValueError(
                f"dim must be a multiple of 4 with position='sincos2d', got {self.dim}"
            )

    def _settle_pooling(self) -> None:
        for name, default in (("class_token", "token"), ("fc_norm", "mean")):
            if getattr(self, name) is None:
                self._store(name, self.pool == default)
            self._store_flag(name)
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool must be 'mean' when class_token is False, got pool='token'")
