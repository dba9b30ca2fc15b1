"""What every origin of images offers: a Collection of splits, each an ImageSource read by index."""

import dataclasses
from typing import Protocol

import numpy as np


class ImageSource(Protocol):
    """One split: labelled images of one size, read by index. Safe to read from several threads."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads examples: indices [B] -> fresh images uint8 [B, H, W, C], labels int32 [B]."""
        ...


class Collection(Protocol):
    """A data set with named splits, from which sources are opened."""

    @property
    def name(self) -> str:
        """Name without configuration or version, such as "cifar10"."""
        ...

    @property
    def version(self) -> str:
        """Version, with the configuration where there is one."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels."""
        ...

    @property
    def decoded(self) -> bool:
        """True where the images are in memory already, so that a cache gains nothing."""
        ...

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the splits."""
        ...

    def num_examples(self, split: str) -> int:
        """Number of examples of a split; ValueError with near names for an unknown one."""
        ...

    def open(self, split: str) -> ImageSource:
        """Opens a split; ValueError with near names for an unknown one."""
        ...

    def fingerprint(self, split: str) -> str:
        """A text that changes when the stored examples of the split change."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """A split held in arrays, in memory or memory-mapped.

    Attributes:
      images: uint8 [N, H, W, C].
      labels: int32 [N].

    >>> source = ArraySource(np.zeros((3, 8, 8, 1), np.uint8), np.arange(3, dtype=np.int32))
    >>> source.gather(np.array([2, 0]))[1].tolist()
    [2, 0]
    """

    images: np.ndarray
    labels: np.ndarray

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        height, width, channels = self.images.shape[1:]
        return (height, width, channels)

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads examples: indices [B] -> fresh images uint8 [B, H, W, C], labels int32 [B]."""
        return self.images[indices], self.labels[indices]
