"""The embedded data set: scikit-learn's handwritten digits, real scans of 8x8 pixels.

1,797 images of the digits 0 to 9 by 13 writers, the test part of "Optical Recognition of
Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998). They come with
scikit-learn, so nothing is downloaded. They have no official split here; `Digits` fixes one.
"""

import functools

import numpy as np
from PIL import Image

from cumulant_jax.data import decode, random_order
from cumulant_jax.data.source import ArraySource
from cumulant_jax.naming import unknown_name

_SPLIT_SEED = 0
_TEST_PER_CLASS = 36


class Digits:
    """The digits as a collection with the splits "train" (1,437 images) and "test" (360).

    The test split holds 36 images of every class, drawn once with a fixed seed, so it is the same
    for every user, seed and NumPy release. Pixels, stored as 0 .. 16, are scaled to 0 .. 255.

    >>> digits = Digits()
    >>> digits.num_examples("train"), digits.num_examples("test")
    (1437, 360)
    """

    name = "digits"
    version = "1"
    class_names = tuple(str(digit) for digit in range(10))
    decoded = True

    def __init__(self, *, image_size: tuple[int, int] | None = None):
        self._image_size = image_size

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(_splits())

    def num_examples(self, split: str) -> int:
        """Number of images of "train" or "test"."""
        return len(self._indices(split))

    def open(self, split: str) -> ArraySource:
        """Returns the images of "train" or "test" as arrays."""
        images, labels = _load()
        indices = self._indices(split)
        images = images[indices]
        size = self._image_size
        if size is not None and size != images.shape[1:3]:
            scaled = [decode.resize_and_crop(Image.fromarray(i[..., 0]), size) for i in images]
            images = np.stack([np.asarray(image) for image in scaled])[..., None]
        return ArraySource(images, labels[indices])

    def fingerprint(self, split: str) -> str:
        """Names the split; the images never change."""
        return f"digits-{split}"

    def _indices(self, split: str) -> np.ndarray:
        splits = _splits()
        if split not in splits:
            raise ValueError(unknown_name("split of data set 'digits'", split, splits))
        return splits[split]


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    # Imported here: scikit-learn takes a second, which users of other data sets need not wait for.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return images, labels.astype(np.int32)


@functools.cache
def _splits() -> dict[str, np.ndarray]:
    labels = _load()[1]
    order = random_order.permutation(len(labels), _SPLIT_SEED, 0)
    by_class = [order[labels[order] == digit] for digit in range(10)]
    return {
        "train": np.sort(np.concatenate([indices[_TEST_PER_CLASS:] for indices in by_class])),
        "test": np.sort(np.concatenate([indices[:_TEST_PER_CLASS] for indices in by_class])),
    }
