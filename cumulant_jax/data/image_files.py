"""Images in files of their own: a folder for each class, or a list in a CSV file."""

import csv
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cumulant_jax.data import decode
from cumulant_jax.naming import unknown_name

#: What counts as an image in a folder.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".avif", ".gif", ".tif", ".tiff")


@dataclasses.dataclass(frozen=True)
class _Example:
    path: str
    label: int


class _FileCollection:
    """Splits of image files; a subclass finds the classes and the files of a split."""

    decoded = False
    version: str
    class_names: tuple[str, ...]

    def __init__(
        self,
        root: str | os.PathLike,
        *,
        train_split: str = "train",
        image_size: tuple[int, int] | None = None,
        threads: int = 1,
    ):
        self._root = Path(root).expanduser()
        self.name = self._root.name
        self._image_size, self._threads = image_size, threads
        self._splits: dict[str, list[_Example]] = {}
        self.class_names = self._find_classes(train_split)

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the splits."""
        raise NotImplementedError

    def _find_classes(self, split: str) -> tuple[str, ...]:
        raise NotImplementedError

    def _find(self, split: str) -> list[_Example]:
        raise NotImplementedError

    def num_examples(self, split: str) -> int:
        """Number of images of a split."""
        return len(self._examples(split))

    def open(self, split: str) -> "ImageFiles":
        """Opens a split, decoding on demand."""
        return ImageFiles(self._examples(split), image_size=self._image_size, threads=self._threads)

    def fingerprint(self, split: str) -> str:
        """Hash of the files' places, sizes and times."""
        digest = hashlib.sha256(str(self._image_size).encode())
        for example in self._examples(split):
            status = os.stat(example.path)
            line = f"{example.path} {example.label} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(line.encode())
        return digest.hexdigest()[:16]

    def _examples(self, split: str) -> list[_Example]:
        if split not in self._splits:
            self._splits[split] = self._find(split)
        return self._splits[split]

    def _label(self, name: str, where: str) -> int:
        if name not in self.class_names:
            what = f"class in {where}, which the training split has not"
            raise ValueError(unknown_name(what, name, self.class_names))
        return self.class_names.index(name)


class ImageFolders(_FileCollection):
    """`root/SPLIT/CLASS/image.jpg`: every folder of a split is a class, its name the class's.

    The classes are those of the training split, in the order of their names. Other splits have the
    same ones, or some of them. Hidden files and folders are left out.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: a split without classes, or a class without images.
    """

    version = "folder"

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the folders that are splits."""
        return tuple(child.name for child in _folders(self._root))

    def _find_classes(self, split: str) -> tuple[str, ...]:
        if not self._root.is_dir():
            raise FileNotFoundError(f"data_dir: there is no folder {str(self._root)!r}")
        names = tuple(folder.name for folder in _folders(self._folder(split)))
        if not names:
            raise ValueError(f"{self._folder(split)} holds no folders, one for each class")
        return names

    def _folder(self, split: str) -> Path:
        folder = self._root / split
        if not folder.is_dir():
            raise ValueError(unknown_name(f"split of {str(self._root)!r}", split, self.split_names))
        return folder

    def _find(self, split: str) -> list[_Example]:
        examples = []
        for folder in _folders(self._folder(split)):
            label = self._label(folder.name, repr(str(folder.parent)))
            files = sorted(
                entry.path
                for entry in os.scandir(folder)
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".")
            )
            if not files:
                raise ValueError(
                    f"class {folder.name!r}: {folder} holds no images ({', '.join(SUFFIXES)}); add "
                    "some, or delete the folder"
                )
            examples += [_Example(path, label) for path in files]
        return examples


class ImageList(_FileCollection):
    """`root/SPLIT.csv` with the columns `path` and `label`: an image and the name of its class.

    Paths are relative to the CSV file. The classes are those of the training split, in the order of
    their names; names that are all whole numbers are put in the order of the numbers.

    Raises:
      FileNotFoundError: there is no such list, or an image of it is missing.
      ValueError: a list without these columns, or without rows.
    """

    version = "list"

    @property
    def split_names(self) -> tuple[str, ...]:
        """The names of the lists."""
        return tuple(sorted(child.stem for child in self._root.glob("*.csv")))

    def _find_classes(self, split: str) -> tuple[str, ...]:
        names = {name for _, _, name in self._rows(split)}
        are_numbers = all(name.isdecimal() for name in names)
        return tuple(sorted(names, key=int if are_numbers else None))

    def _find(self, split: str) -> list[_Example]:
        examples = []
        for line, path, name in self._rows(split):
            where = f"{self._root / split}.csv, line {line}"
            label = self._label(name, where)
            if not path.is_file():
                raise FileNotFoundError(f"{where}: there is no image {str(path)!r}")
            examples.append(_Example(str(path), label))
        return examples

    def _rows(self, split: str) -> list[tuple[int, Path, str]]:
        """The number, path and class name of every row."""
        file = self._root / f"{split}.csv"
        if not file.is_file():
            if not self.split_names:
                raise FileNotFoundError(f"data_dir: {str(self._root)!r} holds no {file.name}")
            raise ValueError(unknown_name(f"split of {str(self._root)!r}", split, self.split_names))
        rows = []
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if not {"path", "label"} <= set(reader.fieldnames or ()):
                raise ValueError(
                    f"{file}: got the columns {reader.fieldnames}, expected path and label"
                )
            for row in reader:
                if not row["path"] or not row["label"]:
                    raise ValueError(f"{file}, line {reader.line_num}: a path or a label is empty")
                rows.append((reader.line_num, file.parent / row["path"], row["label"]))
        if not rows:
            raise ValueError(f"{file} has no rows")
        return rows


class ImageFiles:
    """One split of images in files, decoded on demand by threads. Pickles into worker processes."""

    def __init__(
        self,
        examples: Sequence[_Example],
        *,
        image_size: tuple[int, int] | None,
        threads: int,
    ):
        self._paths = [example.path for example in examples]
        self._labels = np.array([example.label for example in examples], np.int32)
        self._image_size, self._threads = image_size, threads

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_pool"}

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "decode-images")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and 3 channels: `image_size`, or the size of the first image."""
        return (*self._size, 3)

    @cached_property
    def _size(self) -> tuple[int, int]:
        if self._image_size is not None:
            return self._image_size
        height, width, _ = self._decode(0).shape
        return (height, width)

    @property
    def labels(self) -> np.ndarray:
        """The labels of all examples, int32 [N]."""
        return self._labels

    def __len__(self) -> int:
        return len(self._paths)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads and decodes: indices [B] -> images uint8 [B, H, W, 3], labels int32 [B]."""
        images = np.empty((len(indices), *self.image_shape), np.uint8)

        def fill(position: int) -> None:
            image = self._decode(int(indices[position]))
            if image.shape != images.shape[1:]:
                raise ValueError(
                    f"{self._paths[int(indices[position])]} is {image.shape[0]}x{image.shape[1]}, "
                    f"the first image {images.shape[1]}x{images.shape[2]}: give image_size, to "
                    "which every image is resized"
                )
            images[position] = image

        list(self._pool.map(fill, range(len(indices))))
        return images, self._labels[indices]

    def _decode(self, index: int) -> np.ndarray:
        path = self._paths[index]
        try:
            content = Path(path).read_bytes()
            return decode.decode_image(content, channels=3, image_size=self._image_size)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as an image ({error}); replace it, or delete it"
            ) from error


def _folders(root: Path) -> list[Path]:
    return sorted(
        child for child in root.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
