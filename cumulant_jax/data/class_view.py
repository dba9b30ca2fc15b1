"""Some of the classes of a data set, as a data set of its own: ImageNet-100 out of ImageNet."""

import os
import tempfile
from importlib import resources
from pathlib import Path

import numpy as np

from cumulant_jax.data.cache import default_directory
from cumulant_jax.data.progress import DecodingReport
from cumulant_jax.data.source import Collection, ImageSource
from cumulant_jax.naming import unknown_name

#: Lists that come with the package: the file's name without its ending.
SHIPPED = ("imagenet100",)


def read_class_list(name: str) -> tuple[str, ...]:
    """Reads a list of class names: one that comes with the package, or a text file.

    Args:
      name: "imagenet100", or the path of a file with a name on each line; lines that are empty or
        begin with # are left out.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no names, or one twice.

    >>> len(read_class_list("imagenet100"))
    100
    """
    if name in SHIPPED:
        text = resources.files("cumulant_jax.data").joinpath(f"class_lists/{name}.txt").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        known = unknown_name("class list", name, SHIPPED)
        raise FileNotFoundError(f"class_list: there is no file {name!r}, and it is an {known}")
    lines = (line.strip() for line in text.splitlines())
    names = tuple(line for line in lines if line and not line.startswith("#"))
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        what = f"{', '.join(twice)} twice" if twice else "no names"
        raise ValueError(f"class_list: {name!r} holds {what}")
    return names


class ClassView:
    """The examples of some classes of a collection.

    Classes keep the order that they have in the collection, whatever the order of the list, and
    their labels are numbered from 0 again. Which examples they are is found once by reading all
    labels, and kept in a file of the cache directory.

    Raises:
      ValueError: the collection lacks a class of the list, or a split an example of any.
    """

    def __init__(
        self,
        collection: Collection,
        names: tuple[str, ...],
        *,
        name: str,
        cache_dir: str | os.PathLike | None = None,
    ):
        """Names the classes; nothing is read yet.

        Args:
          collection: where they are.
          names: the classes.
          name: of the list, for messages and file names.
          cache_dir: where the labels are kept; None is `cache.default_directory()`.
        """
        for wanted in names:
            if wanted not in collection.class_names:
                what = f"class of {collection.name} in class_list {name!r}"
                raise ValueError(unknown_name(what, wanted, collection.class_names))
        self._collection = collection
        self.name = f"{collection.name}-{Path(name).stem}"
        self.version = collection.version
        self.decoded = collection.decoded
        self.class_names = tuple(n for n in collection.class_names if n in set(names))
        # Old label to new, -1 for classes that are left out.
        self._new_label = np.full(len(collection.class_names), -1, np.int32)
        for new, wanted in enumerate(self.class_names):
            self._new_label[collection.class_names.index(wanted)] = new
        self._cache = Path(cache_dir).expanduser() if cache_dir else default_directory()
        self._indices: dict[str, np.ndarray] = {}

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the collection's splits."""
        return self._collection.split_names

    def num_examples(self, split: str) -> int:
        """Number of examples of these classes in a split."""
        return len(self._chosen(split))

    def open(self, split: str) -> "ViewedImages":
        """Opens a split."""
        return ViewedImages(self._collection.open(split), self._chosen(split), self._new_label)

    def fingerprint(self, split: str) -> str:
        """That of the collection, and the classes."""
        return f"{self._collection.fingerprint(split)} {' '.join(self.class_names)}"

    def _chosen(self, split: str) -> np.ndarray:
        if split not in self._indices:
            kept = self._new_label[self._labels(split)] >= 0
            if not kept.any():
                raise ValueError(f"split {split!r} has no example of the classes of {self.name}")
            self._indices[split] = np.flatnonzero(kept)
        return self._indices[split]

    def _labels(self, split: str) -> np.ndarray:
        source = self._collection.open(split)
        file = self._cache / f"{self._collection.name}-{self._collection.fingerprint(split)}.labels"
        try:
            labels = np.frombuffer(file.read_bytes(), "<i4")
            if len(labels) == len(source):
                return labels
        except OSError:
            pass
        labels = _read_labels(source, f"labels of split {split!r} of {self._collection.name}")
        _keep(file, labels)
        return labels


class ViewedImages:
    """The chosen examples of a source, with new labels."""

    def __init__(self, source: ImageSource, indices: np.ndarray, new_label: np.ndarray):
        self._source, self._chosen, self._new_label = source, indices, new_label

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        return self._source.image_shape

    def __len__(self) -> int:
        return len(self._chosen)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads examples: indices [B] -> images uint8 [B, H, W, C], labels int32 [B]."""
        images, labels = self._source.gather(self._chosen[indices])
        return images, self._new_label[labels]


def _read_labels(source: ImageSource, what: str) -> np.ndarray:
    labels = getattr(source, "labels", None)
    if labels is not None:
        return np.asarray(labels, np.int32)
    with DecodingReport(what) as report:
        found = np.empty(len(source), np.int32)
        for index in range(len(source)):
            found[index] = source.label(index)  # type: ignore[attr-defined]
            if index % 1024 == 0:
                report(index, len(source))
    return found


def _keep(file: Path, labels: np.ndarray) -> None:
    """Writes the labels under their name once they are whole; without a place for them, not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(labels.astype("<i4").tobytes())
        os.replace(temporary, file)
    except OSError:
        return
