"""Decoded images kept in memory or in one memory-mapped file per split, checked when opened.

A cache file is a header of 4,096 bytes (one line of JSON), the images (uint8 [N, H, W, C]) and the
labels (int32 [N], little endian). The header names what was decoded and holds a checksum of the
rest. A file is written under another name and renamed when it is complete, so a half-written one is
never read; one that is damaged or was made from other data is made anew.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cumulant_jax.data.progress import Progress
from cumulant_jax.data.source import ArraySource, ImageSource

_FORMAT = 1
_HEADER_BYTES = 4096
_CHUNK_IMAGES = 1024
_CHUNK_BYTES = 1 << 24
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Says what a cache file holds.

    Attributes:
      name: name of the data set.
      version: its version.
      split: the split.
      fingerprint: changes when the stored examples or the way they are decoded change.
    """

    name: str
    version: str
    split: str
    fingerprint: str

    def file_name(self) -> str:
        """A readable name, made unique by a hash of the whole key.

        >>> CacheKey("cifar10", "3.0.2", "train[:9]", "0123").file_name()
        'cifar10-3.0.2-train__9_-...images'
        """
        text = "-".join((self.name, self.version, self.split))
        safe = "".join(char if char.isalnum() or char in ".-" else "_" for char in text)
        digest = hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()
        return f"{safe[:80]}-{digest[:12]}.images"


def default_directory() -> Path:
    """$CUMULANT_JAX_CACHE, else $XDG_CACHE_HOME/cumulant_jax, else ~/.cache/cumulant_jax."""
    if chosen := os.environ.get("CUMULANT_JAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cumulant_jax"


def decode_to_memory(source: ImageSource, *, progress: Progress | None = None) -> ArraySource:
    """Decodes a whole split into arrays.

    Args:
      source: the split to read.
      progress: called with (images done, images in all) now and then.

    Raises:
      ValueError: the images need more memory than is free.
    """
    shape = (len(source), *source.image_shape)
    free = _free_memory()
    if free is not None and np.prod(shape, dtype=np.int64) > free:
        raise ValueError(
            f"{shape[0]} images of {shape[1:]} need {np.prod(shape, dtype=np.int64) / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB of memory are free: set cache='none' or a smaller image_size"
        )
    images, labels = np.empty(shape, np.uint8), np.empty(len(source), np.int32)
    for start, (part, part_labels) in _decoded_chunks(source, progress):
        images[start : start + len(part)] = part
        labels[start : start + len(part)] = part_labels
    return ArraySource(images, labels)


def open_or_create(
    source: ImageSource,
    key: CacheKey,
    *,
    directory: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ArraySource:
    """Returns the split from its cache file, decoding it into the file first where needed.

    Where the file cannot be written (no space, no permission) the split is decoded into memory, and
    the log says so.

    Args:
      source: the split to decode when there is no valid file.
      key: what the file has to hold.
      directory: where cache files are; None is `default_directory()`.
      progress: called with (images done, images in all) while decoding.

    Returns:
      The images, memory-mapped and read-only.
    """
    folder = Path(directory).expanduser() if directory is not None else default_directory()
    path = folder / key.file_name()
    try:
        return read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.warning("cache file %s is unusable (%s); decoding again", path, error)
    try:
        write(path, source, key, progress=progress)
        return read(path, key)
    except OSError as error:
        _logger.warning("no cache file %s (%s); decoding into memory", path, error)
        return decode_to_memory(source, progress=progress)


def read(path: Path, key: CacheKey) -> ArraySource:
    """Maps a cache file into memory after checking its header, size and checksum.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged or holds something else.
    """
    with open(path, "rb") as file:
        shape, crc32 = _parse_header(file.read(_HEADER_BYTES), key)
        image_bytes = math.prod(shape)
        expected = _HEADER_BYTES + image_bytes + 4 * shape[0]
        if os.fstat(file.fileno()).st_size != expected:
            raise ValueError("wrong size")
        checksum = 0
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
        if checksum != crc32:
            raise ValueError("wrong checksum")
        mapped = np.memmap(file, np.uint8, mode="r", offset=_HEADER_BYTES)
    # Plain arrays over the mapping: indexing a memmap object itself costs more per call.
    flat = mapped.view(np.ndarray)
    labels = flat[image_bytes:].view("<i4").astype(np.int32)
    return ArraySource(flat[:image_bytes].reshape(shape), labels)


def _parse_header(text: bytes, key: CacheKey) -> tuple[tuple[int, ...], int]:
    """Shape [N, H, W, C] and checksum out of a header, which may hold anything at all."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("no valid header") from None
    if not isinstance(header, dict):
        raise ValueError("no valid header")
    if header.get("format") != _FORMAT or header.get("key") != dataclasses.asdict(key):
        raise ValueError("made from other data or by another version")
    shape, crc32 = header.get("shape"), header.get("crc32")
    if not isinstance(shape, list) or len(shape) != 4 or type(crc32) is not int:
        raise ValueError("no valid header")
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError("no valid header")
    return tuple(shape), crc32


def write(
    path: Path, source: ImageSource, key: CacheKey, *, progress: Progress | None = None
) -> None:
    """Decodes a split into a cache file, which appears under its name only when complete.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (len(source), *source.image_shape)
    needed = _HEADER_BYTES + int(np.prod(shape, dtype=np.int64)) + 4 * shape[0]
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _write_contents(file, source, key, shape, progress)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_contents(
    file: BinaryIO,
    source: ImageSource,
    key: CacheKey,
    shape: tuple[int, ...],
    progress: Progress | None,
) -> None:
    file.seek(_HEADER_BYTES)
    checksum = 0
    all_labels = []
    for _, (images, labels) in _decoded_chunks(source, progress):
        checksum = zlib.crc32(images, checksum)
        file.write(images)
        all_labels.append(labels)
    labels = np.concatenate(all_labels).astype("<i4")
    file.write(labels)
    header: dict[str, Any] = {
        "format": _FORMAT,
        "key": dataclasses.asdict(key),
        "shape": shape,
        "crc32": zlib.crc32(labels, checksum),
    }
    file.seek(0)
    file.write(json.dumps(header).encode().ljust(_HEADER_BYTES - 1) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _decoded_chunks(
    source: ImageSource, progress: Progress | None
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    count = len(source)
    for start in range(0, count, _CHUNK_IMAGES):
        stop = min(start + _CHUNK_IMAGES, count)
        yield start, source.gather(np.arange(start, stop))
        if progress is not None:
            progress(stop, count)


def _free_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
