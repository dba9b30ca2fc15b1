"""What the options of all vision models have in common: one frozen, validated record."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.transformer_options import TransformerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionOptions(TransformerOptions):
    """The options that every vision model takes: those of `TransformerOptions`, and these.

    Attributes:
      num_classes: classes of the head; 0 leaves the head out and the model returns its features.
      image_size: (height, width) in pixels, or one number for both.
      patch_size: (height, width) in pixels, or one number for both.
      channels: channels of the images.
    """

    num_classes: int = 1000
    image_size: checks.Size = 224
    patch_size: checks.Size = 16
    channels: int = 3

    def __post_init__(self):
        """Brings every option into its one stored form and checks it.

        Raises:
          ValueError: an option has a value that no model can have.
          TypeError: an option is of the wrong kind.
        """
        super().__post_init__()
        for name in ("image_size", "patch_size"):
            self._store(name, checks.size_pair(name, getattr(self, name)))

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches; a patch that the image fills in part counts as one."""
        height, width = checks.size_pair("image_size", self.image_size)
        rows, columns = checks.size_pair("patch_size", self.patch_size)
        return -(-height // rows), -(-width // columns)

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and type of an input with one example."""
        size = checks.size_pair("image_size", self.image_size)
        return jax.ShapeDtypeStruct((1, *size, self.channels), jnp.dtype("float32"))

    @property
    def tokens(self) -> int:
        """Tokens that the blocks see."""
        return math.prod(self.grid)

    def _check_numbers(self) -> None:
        checks.check_count("num_classes", self.num_classes, least=0)
        checks.check_count("channels", self.channels, least=1)
        super()._check_numbers()

    def _check_divides_image(self) -> None:
        image = checks.size_pair("image_size", self.image_size)
        patch = checks.size_pair("patch_size", self.patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(f"image_size {image} must be a multiple of patch_size {patch}")

    def _check_position(self, position: str, known: Any) -> None:
        checks.check_name("position", position, known)
        if position == "sincos2d" and self.dim % 4:
            raise ValueError(
                f"dim must be a multiple of 4 with position='sincos2d', got {self.dim}"
            )
