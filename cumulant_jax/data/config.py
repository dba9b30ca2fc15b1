"""DataConfig: which data set to read, how to present its images, where decoded copies are kept."""

import dataclasses
import math
import numbers
import os
from typing import Any

from cumulant_jax.data import augment
from cumulant_jax.naming import unknown_name

_OPTIONAL_TEXTS = ("data_dir", "cache_dir", "image_key", "label_key", "class_list", "eval_split")
CACHES = ("disk", "memory", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Describes an image classification data set and its input pipeline.

    Attributes:
      name: "digits" (embedded), or a TFDS builder prepared as array_record: "cifar10",
        "imagenette/320px-v2" (with its config), "cifar10:3.0.2" (with its version); or "folder" for
        images in data_dir/SPLIT/CLASS/, or "list" for those of data_dir/SPLIT.csv with the columns
        path and label.
      data_dir: the TFDS data directory; None reads the environment variable TFDS_DATA_DIR and
        falls back to ~/tensorflow_datasets. For "folder" and "list" the folder that holds them.
      class_list: take the examples of these classes only, with labels from 0 in the data set's own
        order: "imagenet100", or a text file with the name of a class on each line.
      num_classes: how many classes there must be; None does not check.
      train_split: the split to train on, in TFDS's syntax ("train", "train[:90%]").
      eval_split: the split to evaluate on; None is the data set's own: "test", or "validation"
        where there is none or its labels are not public.
      image_size: height and width in pixels, or one int for both; None keeps the stored size.
        Images are resized to cover it (short side) and cropped at the centre.
      augment: training augmentations in order, each a name with options in brackets: "flip",
        "flip(probability=0.5)", "crop", "crop(padding=4, mode=zero)".
      cache: "disk" decodes once into a memory-mapped file that later runs reuse, "memory" decodes
        at every start, "none" decodes while training (for data that fit neither).
      cache_dir: directory of the cache files; None reads CUMULANT_JAX_CACHE and falls back to
        $XDG_CACHE_HOME/cumulant_jax or ~/.cache/cumulant_jax.
      image_key: name of the image feature; None finds it in the data set's own description.
      label_key: name of the label feature; None finds it in the data set's own description.
      mean: channel means for pixels in 0..1; None takes the published ones or computes them.
      std: channel standard deviations for pixels in 0..1, as for `mean`.
      threads: threads that decode images; None is one per CPU core, at most 16. Images of less than
        8 kB are decoded by one thread, which is faster.
      workers: processes that decode images, each with `threads` threads; 0 decodes in this process.
        Only with cache="none". The main script then needs an `if __name__ == "__main__"` guard.
      prefetch: batches kept ready.

    Raises:
      TypeError, ValueError: for an option that is not as described, naming it.

    >>> DataConfig(name="cifar10", augment=["flip", "crop"], image_size=32).image_size
    (32, 32)
    """

    name: str = "digits"
    data_dir: str | None = None
    class_list: str | None = None
    num_classes: int | None = None
    train_split: str = "train"
    eval_split: str | None = None
    image_size: Any = None
    augment: tuple[str, ...] = ()
    cache: str = "disk"
    cache_dir: str | None = None
    image_key: str | None = None
    label_key: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    threads: int | None = None
    workers: int = 0
    prefetch: int = 4

    def __post_init__(self):
        """Checks every option and turns lists (from JSON and config files) into tuples."""
        for field in ("name", "train_split"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise TypeError(f"{field} must be a non-empty string, got {value!r}")
        for field in _OPTIONAL_TEXTS:
            self._set(field, _optional_text(field, getattr(self, field)))
        if self.cache not in CACHES:
            raise ValueError(unknown_name("cache", self.cache, CACHES))
        self._set("image_size", _image_size(self.image_size))
        if not isinstance(self.augment, (tuple, list)):
            came = f"the string {self.augment!r}" if isinstance(self.augment, str) else self.augment
            raise TypeError(f"augment must be a tuple of strings, got {came}")
        self._set("augment", tuple(self.augment))
        augment.parse(self.augment)
        for field in ("mean", "std"):
            self._set(field, _channel_values(field, getattr(self, field)))
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std belong together: give both or neither")
        numbers = (("threads", 1), ("workers", 0), ("prefetch", 1), ("num_classes", 1))
        for field, least in numbers:
            value = getattr(self, field)
            if field in ("threads", "num_classes") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field} must be an integer of at least {least}, got {value!r}")
        if self.workers and self.cache != "none":
            raise ValueError(
                f"workers={self.workers} needs cache='none', got cache={self.cache!r}: decoded"
                " images are read by one thread"
            )

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)


def _optional_text(field: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if field.endswith("_dir") and isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise TypeError(f"{field} must be None or a non-empty string, got {value!r}")


def _image_size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(type(side) is int and side > 0 for side in pair)
    ):
        raise ValueError(f"image_size must be a positive int or (height, width), got {value!r}")
    return (pair[0], pair[1])


def _channel_values(field: str, values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    if not isinstance(values, (tuple, list)) or not values:
        raise TypeError(f"{field} must hold one number per channel, got {values!r}")
    for value in values:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{field} must hold numbers, one per channel, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{field} must be finite, got {value!r}")
    channels = tuple(map(float, values))
    if field == "std" and min(channels) <= 0:
        raise ValueError(f"std must be positive, got {channels}")
    return channels
