"""Dataset: a data set with its description and its splits, opened (and decoded) when first used."""

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

from cumulant_jax.data import cache, statistics
from cumulant_jax.data.class_view import ClassView, read_class_list
from cumulant_jax.data.config import DataConfig
from cumulant_jax.data.digits import Digits
from cumulant_jax.data.image_files import ImageFolders, ImageList
from cumulant_jax.data.progress import DecodingReport, Progress
from cumulant_jax.data.source import Collection, ImageSource


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """What a model and a training run need to know about a data set.

    Attributes:
      name: name without configuration or version.
      version: version, after the configuration where there is one.
      num_classes: number of classes.
      class_names: their names in the order of the labels.
      image_shape: (height, width, channels) of the batches.
      mean: channel means, for pixels in 0..1.
      std: channel standard deviations, for pixels in 0..1.
      num_train: examples in the training split.
      num_eval: examples in the evaluation split.
    """

    name: str
    version: str
    num_classes: int
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    num_eval: int


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A data set as a configuration presents it; made by `load`.

    Attributes:
      config: the configuration.
      info: the description.
    """

    config: DataConfig
    info: DatasetInfo
    _splits: "_Splits" = dataclasses.field(repr=False)

    def source(self, split: str) -> ImageSource:
        """Opens a split; the first call decodes it, unless cache="none" or a cache file is there.

        >>> len(load(DataConfig(name="digits")).source("test"))
        360
        """
        return self._splits.open(split)


def load(
    config: DataConfig | None = None,
    *,
    progress: Progress | None = None,
    collection: Collection | None = None,
) -> Dataset:
    """Finds a data set and describes it. Nothing is ever downloaded.

    Args:
      config: which data set and how; None is the embedded digits.
      progress: called with (images done, images in all) while images are decoded into the cache.
        None: a decoding of more than two seconds reports on standard error, as a progress bar in
        a terminal and else as lines.
      collection: the examples, such as an `ArrayCollection`, instead of those of `config.name`.

    Returns:
      The data set. Its splits are decoded when they are first used; this call itself decodes the
      training split only where means and standard deviations have to be computed from it.

    Raises:
      FileNotFoundError: not prepared; the message has the command that prepares it.
      ValueError: an unknown name, split or class, another number of classes than `num_classes`,
        images that differ in size without `image_size`, or means for another number of channels.

    >>> info = load(DataConfig(name="digits")).info
    >>> info.image_shape, info.num_classes, info.num_train, info.num_eval
    ((8, 8, 1), 10, 1437, 360)
    """
    config = config or DataConfig()
    collection = collection or _COLLECTIONS.get(config.name, _open_tfds)(config)
    if config.class_list is not None:
        names = read_class_list(config.class_list)
        collection = ClassView(
            collection, names, name=config.class_list, cache_dir=config.cache_dir
        )
    if config.num_classes not in (None, len(collection.class_names)):
        raise ValueError(
            f"num_classes is {config.num_classes}, but {collection.name} has "
            f"{len(collection.class_names)} classes"
        )
    if config.eval_split is None:
        config = dataclasses.replace(config, eval_split=_own_eval_split(collection))
    eval_split = str(config.eval_split)
    counts = {split: collection.num_examples(split) for split in (config.train_split, eval_split)}
    for split, count in counts.items():
        if count == 0:
            raise ValueError(f"split {split!r} of data set {config.name!r} is empty")
    splits = _Splits(collection, config, progress)
    image_shape = collection.open(config.train_split).image_shape
    mean, std = _normalisation(config, collection, splits, image_shape[2])
    info = DatasetInfo(
        name=collection.name,
        version=collection.version,
        num_classes=len(collection.class_names),
        class_names=collection.class_names,
        image_shape=image_shape,
        mean=mean,
        std=std,
        num_train=counts[config.train_split],
        num_eval=counts[eval_split],
    )
    return Dataset(config, info, splits)


def _open_digits(config: DataConfig) -> Collection:
    return Digits(image_size=config.image_size)


def _open_folders(config: DataConfig) -> Collection:
    return ImageFolders(_root(config), **_file_options(config))


def _open_list(config: DataConfig) -> Collection:
    return ImageList(_root(config), **_file_options(config))


def _root(config: DataConfig) -> str:
    if config.data_dir is None:
        raise ValueError(f"data_dir must name the folder of name={config.name!r}, got None")
    return config.data_dir


def _file_options(config: DataConfig) -> dict[str, Any]:
    return {
        "train_split": config.train_split,
        "image_size": config.image_size,
        "threads": config.threads or min(16, os.cpu_count() or 1),
    }


def _own_eval_split(collection: Collection) -> str:
    """The split that a data set is evaluated on: "test", unless its labels are not public."""
    order = ("test", "validation", "valid", "val")
    for split in order[1:] if collection.name in _SECRET_TESTS else order:
        if split in collection.split_names:
            return split
    raise ValueError(
        f"eval_split must be given: {collection.name} has the splits "
        f"{', '.join(collection.split_names)}, none of them called {', '.join(order)}"
    )


def _open_tfds(config: DataConfig) -> Collection:
    # Imported here, so that the digits work where tensorflow_datasets is not installed.
    from cumulant_jax.data.tfds_source import TfdsCollection

    return TfdsCollection(
        config.name,
        data_dir=config.data_dir,
        image_size=config.image_size,
        image_key=config.image_key,
        label_key=config.label_key,
        threads=config.threads or min(16, os.cpu_count() or 1),
    )


_COLLECTIONS: dict[str, Callable[[DataConfig], Collection]] = {
    "digits": _open_digits,
    "folder": _open_folders,
    "list": _open_list,
}

# Whose labels of the split "test" are not public.
_SECRET_TESTS = ("imagenet2012", "imagenet2012-imagenet100")


def _normalisation(
    config: DataConfig, collection: Collection, splits: "_Splits", channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if config.mean is not None and config.std is not None:
        if {len(config.mean), len(config.std)} != {channels}:
            raise ValueError(
                f"mean and std must have {channels} values, one per channel of {config.name!r}, "
                f"got {config.mean} and {config.std}"
            )
        return config.mean, config.std
    published = statistics.PUBLISHED.get(collection.name)
    if published is not None and len(published[0]) == channels:
        return published
    return statistics.channel_statistics(splits.open(config.train_split))


class _Splits:
    """Opens every split once, as the configured kind of cache."""

    def __init__(self, collection: Collection, config: DataConfig, progress: Progress | None):
        self._collection = collection
        self._config = config
        self._progress = progress
        self._opened: dict[str, ImageSource] = {}
        self._lock = threading.Lock()

    def open(self, split: str) -> ImageSource:
        with self._lock:
            if split not in self._opened:
                self._opened[split] = self._open(split)
            return self._opened[split]

    def _open(self, split: str) -> ImageSource:
        source = self._collection.open(split)
        if self._collection.decoded or self._config.cache == "none":
            return source
        if self._progress is not None:
            return self._decoded(source, split, self._progress)
        with DecodingReport(f"split {split!r} of {self._collection.name}") as report:
            return self._decoded(source, split, report)

    def _decoded(self, source: ImageSource, split: str, report: Progress) -> ImageSource:
        if self._config.cache == "memory":
            return cache.decode_to_memory(source, progress=report)
        key = cache.CacheKey(
            self._collection.name,
            self._collection.version,
            split,
            self._collection.fingerprint(split),
        )
        return cache.open_or_create(source, key, directory=self._config.cache_dir, progress=report)
