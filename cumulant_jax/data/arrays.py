"""Images that are in memory already, as a data set."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from cumulant_jax.data.source import ArraySource
from cumulant_jax.naming import unknown_name


class ArrayCollection:
    """Arrays of images and labels by split, for `load(collection=...)`.

    Raises:
      TypeError, ValueError: arrays that are not as described, naming the split.

    >>> images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1])
    >>> collection = ArrayCollection({"train": (images, labels), "test": (images, labels)})
    >>> collection.class_names, collection.num_examples("test")
    (('0', '1'), 4)
    """

    decoded = True
    version = "arrays"

    def __init__(
        self,
        splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
        *,
        class_names: Sequence[str] | None = None,
        name: str = "arrays",
    ):
        """Checks the arrays; they are not copied.

        Args:
          splits: name to images uint8 [N, H, W, C] and labels, integers [N].
          class_names: in the order of the labels; None counts from 0 to the largest label.
          name: of the data set.
        """
        self.name = name
        largest = max((int(np.max(labels, initial=0)) for _, labels in splits.values()), default=0)
        self.class_names = tuple(class_names or map(str, range(largest + 1)))
        self._splits = {key: self._checked(key, *arrays) for key, arrays in splits.items()}

    def _checked(self, split: str, images: np.ndarray, labels: np.ndarray) -> ArraySource:
        if images.dtype != np.uint8 or images.ndim != 4:
            raise TypeError(
                f"split {split!r}: images must be uint8 [N, H, W, C], got {images.dtype} "
                f"{list(images.shape)}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
            raise TypeError(
                f"split {split!r}: labels must be {len(images)} integers, got {labels.dtype} "
                f"{list(labels.shape)}"
            )
        wrong = np.flatnonzero((labels < 0) | (labels >= len(self.class_names)))
        if len(wrong):
            raise ValueError(
                f"split {split!r}, example {wrong[0]}: label {labels[wrong[0]]} is not in 0 .. "
                f"{len(self.class_names) - 1}"
            )
        return ArraySource(images, labels.astype(np.int32))

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self._splits)

    def num_examples(self, split: str) -> int:
        """Number of examples of a split."""
        return len(self.open(split))

    def open(self, split: str) -> ArraySource:
        """The arrays of a split."""
        if split not in self._splits:
            raise ValueError(unknown_name(f"split of {self.name!r}", split, self._splits))
        return self._splits[split]

    def fingerprint(self, split: str) -> str:
        """Hash of the arrays."""
        source = self.open(split)
        digest = hashlib.sha256(np.ascontiguousarray(source.images))
        digest.update(source.labels)
        return digest.hexdigest()[:16]
