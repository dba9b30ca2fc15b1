"""Images of any TFDS classification data set prepared as array_record, read without TensorFlow."""

import concurrent.futures
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cumulant_jax.data import decode, tfds_locate
from cumulant_jax.naming import unknown_name

# Decoding an image of fewer bytes is mostly Python, which one thread does faster than several.
_SMALL_BYTES = 8192


class TfdsCollection:
    """A prepared TFDS data set.

    Attributes:
      name: name of the builder, such as "cifar10".
      version: version, after the configuration where there is one ("320px-v2-1.0.0").
      class_names: names of the classes in the order of their labels.

    Raises:
      FileNotFoundError: not prepared, or a file of it is missing.
      ValueError: unknown name; prepared in another file format; no image or no class label in it.
    """

    decoded = False

    def __init__(
        self,
        name: str,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        image_size: tuple[int, int] | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        threads: int = 1,
    ):
        self._directory = tfds_locate.find(name, data_dir)
        builder = _open_builder(self._directory)
        info = builder.info
        self.name = info.name
        config = builder.builder_config
        self.version = f"{config.name}-{info.version}" if config else str(info.version)
        self._splits = info.splits
        keys = {"image": image_key, "label": label_key}
        self._image_key, self._label_key = _feature_keys(info, keys)
        self._channels = _channels(info, self._image_key)
        label = info.features[self._label_key]
        self.class_names = tuple(label.names or map(str, range(label.num_classes)))
        self._image_size = image_size
        self._threads = threads

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the splits, whole ones."""
        return tuple(self._splits)

    def num_examples(self, split: str) -> int:
        """Number of examples of a split."""
        return self._split(split).num_examples

    def open(self, split: str) -> "TfdsSource":
        """Opens a split, decoding on demand."""
        self.fingerprint(split)  # names a missing file now rather than in the middle of training
        return TfdsSource(
            directory=self._directory,
            split=split,
            image_key=self._image_key,
            label_key=self._label_key,
            channels=self._channels,
            num_classes=len(self.class_names),
            image_size=self._image_size,
            threads=self._threads,
        )

    def fingerprint(self, split: str) -> str:
        """Hash of the location, sizes and times of the split's files and of what is read."""
        parts = [split, self._image_key, self._label_key, str(self._image_size)]
        for path in sorted(map(str, self._split(split).filepaths)):
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"data set {self.name!r} is incomplete: {path} is missing; delete "
                    f"{self._directory} and prepare it again"
                )
            status = os.stat(path)
            parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _split(self, split: str) -> Any:
        try:
            return self._splits[split]
        except ValueError:
            what = f"split of data set {self.name!r}"
            remedy = "Parts of a split are written as 'train[:90%]'."
            raise ValueError(unknown_name(what, split, self._splits, remedy=remedy)) from None


class TfdsSource:
    """One split of a prepared TFDS data set, decoded on demand by a pool of threads.

    Pickles into worker processes: the files and the pool are opened on first use.
    """

    def __init__(
        self,
        *,
        directory: Path,
        split: str,
        image_key: str,
        label_key: str,
        channels: int,
        num_classes: int,
        image_size: tuple[int, int] | None,
        threads: int,
    ):
        self._directory = directory
        self._split = split
        self._image_key = image_key
        self._label_key = label_key
        self._channels = channels
        self._num_classes = num_classes
        self._image_size = image_size
        self._threads = threads

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_records", "_pool")
        return {key: value for key, value in self.__dict__.items() if key not in opened}

    @functools.cached_property
    def _records(self) -> Sequence[dict[str, Any]]:
        import tensorflow_datasets as tfds

        builder = _open_builder(self._directory)
        # Images stay encoded: Pillow decodes the one that is used, in its own mode and size. TFDS
        # would decode every image of a record (masks too) and warn about a missing OpenCV.
        images = _keys_of_type(builder.info, tfds.features.Image)
        decoders = dict.fromkeys(images, tfds.decode.SkipDecoding())
        return builder.as_data_source(self._split, decoders=decoders)

    @functools.cached_property
    def _small(self) -> bool:
        return len(self._records[0][self._image_key]) < _SMALL_BYTES

    @functools.cached_property
    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(self._threads, "decode-images")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels: `image_size`, or the size of the first image."""
        return self._image_shape

    @functools.cached_property
    def _image_shape(self) -> tuple[int, int, int]:
        if self._image_size is not None:
            return (*self._image_size, self._channels)
        height, width, channels = self._read(0)[0].shape
        return (height, width, channels)

    def __len__(self) -> int:
        return len(self._records)

    def label(self, index: int) -> int:
        """Reads the label of an example, without decoding its image."""
        return self._checked_label(self._records[index][self._label_key], index)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads and decodes: indices [B] -> images uint8 [B, H, W, C], labels int32 [B]."""
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        labels = np.empty(len(indices), np.int32)
        _ = self._records  # opened here, once, rather than by every thread

        def fill(positions: np.ndarray) -> None:
            for position in positions:
                image, labels[position] = self._read(int(indices[position]))
                if image.shape != images.shape[1:]:
                    raise ValueError(self._sizes_differ(image.shape))
                images[position] = image

        positions = np.arange(len(indices))
        if self._threads == 1 or self._small:
            fill(positions)
        else:
            parts = min(len(indices), 4 * self._threads)
            list(self._pool.map(fill, np.array_split(positions, parts)))
        return images, labels

    def _read(self, index: int) -> tuple[np.ndarray, int]:
        record = self._records[index]
        try:
            image = decode.decode_image(
                record[self._image_key], channels=self._channels, image_size=self._image_size
            )
        except OSError as error:
            raise ValueError(f"{self._where(index)}: cannot decode the image: {error}") from error
        return image, self._checked_label(record[self._label_key], index)

    def _checked_label(self, label: int, index: int) -> int:
        if not 0 <= label < self._num_classes:
            raise ValueError(
                f"{self._where(index)}: label {label} is not in 0 .. {self._num_classes - 1}; "
                "a split without public labels cannot be used here"
            )
        return label

    def _where(self, index: int) -> str:
        return f"record {index} of split {self._split!r} in {self._directory}"

    def _sizes_differ(self, shape: tuple[int, ...]) -> str:
        first, other = (f"{height}x{width}" for height, width, _ in (self.image_shape, shape))
        return (
            f"the images of {self._directory} differ in size ({first} and {other}): give "
            "image_size, to which every image is resized"
        )


def _open_builder(directory: Path) -> Any:
    import tensorflow_datasets as tfds

    try:
        return tfds.builder_from_directory(directory, file_format="array_record")
    except ValueError as error:
        if "ile format" not in str(error):
            raise
        raise ValueError(
            f"{directory} is not prepared as array_record; convert it with: tfds convert_format "
            f"--dataset_version_dir={directory} --out_file_format=array_record"
        ) from None


def _keys_of_type(info: Any, kind: type) -> list[str]:
    return [key for key, feature in info.features.items() if isinstance(feature, kind)]


def _feature_keys(info: Any, given: dict[str, str | None]) -> tuple[str, str]:
    """Finds the image and the label: as given, as declared (supervised_keys), or the only ones."""
    import tensorflow_datasets as tfds

    kinds = {"image": tfds.features.Image, "label": tfds.features.ClassLabel}
    if not hasattr(info.features, "items"):
        raise ValueError(f"data set {info.name!r} has no named features: {info.features}")
    supervised = info.supervised_keys or ()
    found = []
    for role, kind in kinds.items():
        candidates = _keys_of_type(info, kind)
        key = given[role]
        if key is not None:
            if key not in candidates:
                what = f"{role} feature of data set {info.name!r}"
                raise ValueError(unknown_name(what, key, candidates))
        elif declared := [name for name in supervised if name in candidates]:
            key = declared[0]
        elif len(candidates) == 1:
            key = candidates[0]
        else:
            have = ", ".join(f"{name}: {type(f).__name__}" for name, f in info.features.items())
            raise ValueError(
                f"data set {info.name!r} has {len(candidates)} features of type {kind.__name__} "
                f"({have}); name the {role} with {role}_key"
            )
        found.append(key)
    return found[0], found[1]


def _channels(info: Any, image_key: str) -> int:
    feature = info.features[image_key]
    channels = feature.shape[-1]
    if channels not in (1, 3, 4) or feature.np_dtype != np.uint8:
        raise ValueError(
            f"data set {info.name!r}: images must be uint8 with 1, 3 or 4 channels, got {feature}"
        )
    return channels
