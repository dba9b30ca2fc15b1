"""Cache files: equal to direct decoding, reused, and rebuilt when damaged or outdated."""

import json
import logging
import os

import numpy as np
import pytest

from cumulant_jax.data import DataConfig, cache, load
from cumulant_jax.data.source import ArraySource

KEY = cache.CacheKey("set", "1.0.0", "train", "abc")


class Counting:
    """A source that counts how often it is decoded."""

    def __init__(self, count=2500, seed=0):
        rng = np.random.default_rng(seed)
        self.images = rng.integers(0, 256, (count, 5, 4, 3), np.uint8)
        self.labels = rng.integers(0, 10, count).astype(np.int32)
        self.image_shape = (5, 4, 3)
        self.decoded = 0

    def __len__(self):
        return len(self.images)

    def gather(self, indices):
        self.decoded += len(indices)
        return self.images[indices], self.labels[indices]


def assert_holds(array_source, source):
    np.testing.assert_array_equal(array_source.images, source.images)
    np.testing.assert_array_equal(array_source.labels, source.labels)
    assert array_source.labels.dtype == np.int32


def only_file(directory):
    (path,) = directory.iterdir()
    return path


def test_second_opening_does_not_decode(tmp_path):
    source = Counting()
    for _ in range(2):
        opened = cache.open_or_create(source, KEY, directory=tmp_path / "new" / "folder")
        assert_holds(opened, source)
        assert source.decoded == 2500
    assert not opened.images.flags.writeable


def test_memory_equals_the_source():
    source = Counting()
    assert_holds(cache.decode_to_memory(source), source)


def test_progress_reaches_the_end(tmp_path):
    for name, call in (
        ("memory", lambda progress: cache.decode_to_memory(Counting(), progress=progress)),
        (
            "disk",
            lambda progress: cache.open_or_create(
                Counting(), KEY, directory=tmp_path, progress=progress
            ),
        ),
    ):
        seen = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == [(1024, 2500), (2048, 2500), (2500, 2500)], name


def damage_byte(position):
    def change(data):
        data[position] ^= 1

    return change


def cut(data):
    del data[-5:]


def empty(data):
    data.clear()


def grow(data):
    data.extend(b"\0")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(damage_byte(5000), id="image"),
        pytest.param(damage_byte(-3), id="label"),
        pytest.param(damage_byte(0), id="header"),
        pytest.param(damage_byte(20), id="header-value"),
        cut,
        empty,
        grow,
    ],
)
def test_a_damaged_file_is_found_and_rebuilt(tmp_path, caplog, change):
    source = Counting()
    cache.open_or_create(source, KEY, directory=tmp_path)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    data = bytearray(whole)
    change(data)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert_holds(cache.open_or_create(source, KEY, directory=tmp_path), source)
    assert source.decoded == 5000
    assert "decoding again" in caplog.text
    assert only_file(tmp_path).read_bytes() == whole


def header(**changes):
    """A change of a file's header: keys set, or left out where the value is `...`."""

    def change(data):
        fields = {**json.loads(data[:4096]), **changes}
        fields = {key: value for key, value in fields.items() if value is not ...}
        data[:4096] = json.dumps(fields).encode().ljust(4095) + b"\n"

    return change


def header_text(text):
    def change(data):
        data[:4096] = text.encode().ljust(4096)

    return change


HEADERS = {
    **{text: header_text(text) for text in ("[]", "5", "null", '"text"', "{}", "NaN")},
    "deep": header_text("[" * 4096),
    "no-shape": header(shape=...),
    "no-checksum": header(crc32=...),
    "null-checksum": header(crc32=None),
    **{
        f"shape-{shape}": header(shape=shape)
        for shape in (None, [], 3, {}, [2500], [2500, 5, 4], ["a"] * 4, [2500, 5, 4, None])
    },
    "shape-negative": header(shape=[-2500, 5, -4, 3]),
    "shape-floats": header(shape=[2500.0, 5, 4, 3]),
    "shape-huge": header(shape=[2**62, 5, 4, 3]),
    "shape-zero": header(shape=[0, 5, 4, 3]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_any_malformed_header_counts_as_damage(tmp_path, caplog, name):
    test_a_damaged_file_is_found_and_rebuilt(tmp_path, caplog, HEADERS[name])


def test_a_file_for_another_key_is_not_used(tmp_path):
    cache.open_or_create(Counting(seed=1), KEY, directory=tmp_path)
    other = cache.CacheKey("set", "1.0.0", "train", "abd")
    only_file(tmp_path).rename(tmp_path / other.file_name())
    source = Counting(seed=2)
    assert_holds(cache.open_or_create(source, other, directory=tmp_path), source)


def test_a_failed_write_leaves_nothing(tmp_path):
    class Failing(Counting):
        def gather(self, indices):
            if self.decoded > 1000:
                raise ValueError("bad image")
            return super().gather(indices)

    with pytest.raises(ValueError, match="bad image"):
        cache.open_or_create(Failing(), KEY, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_memory_is_used(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    source = Counting()
    opened = cache.open_or_create(source, KEY, directory=blocked)
    assert_holds(opened, source)
    assert "decoding into memory" in caplog.text


def test_a_full_disk_is_seen_before_decoding(tmp_path, caplog, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    source = Counting()
    assert_holds(cache.open_or_create(source, KEY, directory=tmp_path), source)
    assert source.decoded == 2500
    assert list(tmp_path.iterdir()) == []
    assert "GB are free" in caplog.text


def test_too_little_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(cache, "_free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="set cache='none'"):
        cache.decode_to_memory(Counting())


def test_layout_is_as_documented(tmp_path):
    source = Counting(count=6)
    cache.open_or_create(source, KEY, directory=tmp_path)
    data = only_file(tmp_path).read_bytes()
    header = json.loads(data[:4096])
    assert header["shape"] == [6, 5, 4, 3]
    assert data[4096 : 4096 + 360] == source.images.tobytes()
    assert data[4096 + 360 :] == source.labels.astype("<i4").tobytes()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUMULANT_JAX_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/cumulant_jax"),
        ({"HOME": "/home/me"}, "/home/me/.cache/cumulant_jax"),
    ],
)
def test_default_directory(monkeypatch, environment, expected):
    for name in ("CUMULANT_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache.default_directory()) == expected


def test_a_data_set_is_decoded_again_when_its_files_change(tiny, tmp_path):
    options = {"name": "tiny", "data_dir": str(tiny.data_dir), "cache_dir": str(tmp_path)}
    source = load(DataConfig(**options)).source("train")
    assert isinstance(source, ArraySource)
    assert len(list(tmp_path.iterdir())) == 1
    load(DataConfig(**options)).source("train")
    assert len(list(tmp_path.iterdir())) == 1
    shard = next((tiny.data_dir / "tiny" / "1.0.0").glob("tiny-train*"))
    status = shard.stat()
    try:
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        load(DataConfig(**options)).source("train")
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    load(DataConfig(image_size=6, **options)).source("train")
    assert len(list(tmp_path.iterdir())) == 3
