"""Augmentations of whole uint8 batches, vectorised in NumPy, given their random words from outside.

An augmentation sees a batch [B, H, W, C] and one row of uniformly distributed 64-bit words per
example, so what happens to an example depends only on its words, never on the rest of the batch.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

import numpy as np

from cumulant_jax.naming import unknown_name


class Augmentation(Protocol):
    """A batch augmentation; `words_per_example` columns of random words are handed to it."""

    words_per_example: ClassVar[int]

    def __call__(self, images: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns the augmented batch; may change and return `images` itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Flip:
    """Mirrors images left to right.

    Attributes:
      probability: share of the images that are mirrored.

    >>> image = np.array([[1, 2, 3]], np.uint8).reshape(1, 1, 3, 1)
    >>> Flip(probability=1.0)(image, np.zeros((1, 1), np.uint64)).ravel().tolist()
    [3, 2, 1]
    """

    probability: float = 0.5
    words_per_example: ClassVar[int] = 1

    def __post_init__(self):
        is_number = isinstance(self.probability, (int, float)) and self.probability is not True
        if not is_number or not 0 <= self.probability <= 1:
            raise ValueError(f"flip: probability must be in 0 .. 1, got {self.probability!r}")

    def __call__(self, images: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Mirrors the images [B, H, W, C] whose word falls in the first `probability`."""
        uniform = (words[:, 0] >> np.uint64(11)) * 2.0**-53
        chosen = uniform < self.probability
        # As one item per pixel NumPy reverses twice as fast as byte by byte.
        pixel = np.dtype((np.void, images.shape[3] * images.itemsize))
        pixels = images.view(pixel)[..., 0]
        pixels[chosen] = pixels[chosen][:, :, ::-1]
        return images


@dataclasses.dataclass(frozen=True)
class Crop:
    """Pads every side and cuts out a window of the old size at a random place.

    Attributes:
      padding: pixels per side; None is an eighth of the image's shorter side (4 for 32 pixels).
      mode: "reflect" mirrors the image without repeating its edge, "zero" pads with black.

    >>> image = np.array([[1, 2], [3, 4]], np.uint8).reshape(1, 2, 2, 1)
    >>> Crop(padding=1, mode="zero")(image, np.zeros((1, 2), np.uint64)).ravel().tolist()
    [0, 0, 0, 1]
    """

    padding: int | None = None
    mode: str = "reflect"
    words_per_example: ClassVar[int] = 2

    def __post_init__(self):
        if self.padding is not None and (type(self.padding) is not int or self.padding < 1):
            raise ValueError(f"crop: padding must be a positive integer, got {self.padding!r}")
        if self.mode not in list(_PADDERS):
            raise ValueError(unknown_name("crop mode", self.mode, _PADDERS))

    def __call__(self, images: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Crops images [B, H, W, C]: the words give the top and the left of each window."""
        side = min(images.shape[1:3])
        padding = max(1, side // 8) if self.padding is None else self.padding
        if self.mode == "reflect" and padding >= side:
            raise ValueError(
                f"crop: padding={padding} cannot be reflected in images of {side} pixels;"
                " give a smaller padding or mode=zero"
            )
        corners = (words % np.uint64(2 * padding + 1)).astype(np.int64)
        return _windows(_PADDERS[self.mode](images, padding), corners, images.shape)


def _pad_zero(images: np.ndarray, padding: int) -> np.ndarray:
    batch, height, width, channels = images.shape
    padded = np.zeros((batch, height + 2 * padding, width + 2 * padding, channels), images.dtype)
    padded[:, padding:-padding, padding:-padding] = images
    return padded


def _pad_reflect(images: np.ndarray, padding: int) -> np.ndarray:
    # np.pad does the same and takes three times as long on small images.
    batch, height, width, channels = images.shape
    padded = np.empty((batch, height + 2 * padding, width + 2 * padding, channels), images.dtype)
    rows = padded[:, padding:-padding]
    rows[:, :, padding:-padding] = images
    rows[:, :, :padding] = images[:, :, padding:0:-1]
    rows[:, :, -padding:] = images[:, :, -2 : -2 - padding : -1]
    padded[:, :padding] = rows[:, padding:0:-1]
    padded[:, -padding:] = rows[:, -2 : -2 - padding : -1]
    return padded


_PADDERS = {"reflect": _pad_reflect, "zero": _pad_zero}


def _windows(padded: np.ndarray, corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Cuts the window of `shape` at corners [B, 2] (top, left) from each padded image."""
    batch, height, width, channels = shape
    # Every row of a window is one run of bytes: seen as one void item per possible start, a single
    # gather copies whole rows instead of single pixels.
    row = np.dtype((np.void, width * channels * padded.itemsize))
    starts = padded.shape[2] - width + 1
    rows = np.ndarray(
        (batch, padded.shape[1], starts),
        row,
        buffer=padded,
        strides=(padded.strides[0], padded.strides[1], padded.strides[2]),
    )
    top = corners[:, :1] + np.arange(height)
    cut = rows[np.arange(batch)[:, None], top, corners[:, 1:]]
    return cut.view(padded.dtype).reshape(shape)


AUGMENTATIONS: dict[str, type[Flip] | type[Crop]] = {"flip": Flip, "crop": Crop}


def parse(specs: Iterable[str]) -> tuple[Augmentation, ...]:
    """Builds augmentations from texts such as "crop" or "crop(padding=4, mode=zero)".

    Raises:
      ValueError: for an unknown name, an unknown option or a value that does not fit.

    >>> parse(["flip", "crop(padding=2, mode=zero)"])
    (Flip(probability=0.5), Crop(padding=2, mode='zero'))
    """
    return tuple(_parse_one(spec) for spec in specs)


def _parse_one(spec: str) -> Augmentation:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", spec) if isinstance(spec, str) else None
    if match is None:
        raise ValueError(f"augment: expected 'name' or 'name(option=value, …)', got {spec!r}")
    name, options = match[1], match[2] or ""
    if name not in AUGMENTATIONS:
        raise ValueError(unknown_name("augmentation", name, AUGMENTATIONS))
    kind = AUGMENTATIONS[name]
    known = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals or key not in known:
            raise ValueError(unknown_name(f"option of augmentation {name!r}", key, known))
        values[key] = _number(text)
    return kind(**values)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
