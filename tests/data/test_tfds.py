"""TFDS data sets written by the tests: labels, sizes, streaming, and every error in one line."""

import io
import json
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from cumulant_jax.data import DataConfig, decode, eval_batches, load, train_iterator

from .conftest import CLASSES, encode, make_images, prepare, prepare_plain


def config(prepared, tmp_path=None, **options):
    options = {"name": "tiny", "cache": "memory"} | options
    return DataConfig(data_dir=str(prepared.data_dir), **options)


def everything(dataset, split):
    source = dataset.source(split)
    return source.gather(np.arange(len(source)))


def error_of(call, kind):
    started = time.perf_counter()
    with pytest.raises(kind) as caught:
        call()
    assert time.perf_counter() - started < 5, "a missing data set must be reported at once"
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_image_has_its_own_label(tiny, tmp_path, cache, split):
    dataset = load(config(tiny, cache=cache, cache_dir=str(tmp_path)))
    images, labels = everything(dataset, split)
    pairs = zip(tiny.images[split], tiny.labels[split], strict=True)
    truth = {image.tobytes(): label for image, label in pairs}
    assert len(images) == len(truth)
    assert [truth.pop(image.tobytes()) for image in images] == labels.tolist()
    assert not truth


def test_info(tiny):
    info = load(config(tiny)).info
    assert (info.name, info.version, info.num_classes) == ("tiny", "1.0.0", 3)
    assert info.class_names == CLASSES
    assert info.image_shape == (12, 10, 3)
    assert (info.num_train, info.num_eval) == (37, 11)
    pixels = np.stack(tiny.images["train"]).astype(np.float64) / 255
    assert info.mean == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=6e-5)
    assert info.std == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=6e-5)


def test_parts_of_splits(tiny):
    info = load(config(tiny, train_split="train[:20]", eval_split="train[20:]")).info
    assert (info.num_train, info.num_eval) == (20, 17)


def test_given_mean_and_std(tiny):
    dataset = load(config(tiny, mean=(0.1, 0.2, 0.3), std=(1, 2, 3)))
    assert (dataset.info.mean, dataset.info.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    message = error_of(lambda: load(config(tiny, mean=(0.1,), std=(1,))), ValueError)
    assert "mean and std must have 3 values" in message


@pytest.mark.parametrize("threads", [1, 3])
def test_streaming_equals_the_cached_stream(tiny, monkeypatch, threads):
    monkeypatch.setattr("cumulant_jax.data.tfds_source._SMALL_BYTES", 0)
    options = {"augment": ("flip", "crop")}
    cached = train_iterator(load(config(tiny, **options)), batch_size=9, seed=3)
    streamed_set = load(config(tiny, cache="none", threads=threads, **options))
    streamed = train_iterator(streamed_set, batch_size=9, seed=3)
    for _ in range(12):
        left, right = next(cached), next(streamed)
        np.testing.assert_array_equal(left["image"], right["image"])
        np.testing.assert_array_equal(left["label"], right["label"])
    batches = list(eval_batches(streamed_set, batch_size=4))
    assert sum(batch["weight"].sum() for batch in batches) == 11


def test_streaming_in_worker_processes_equals_the_cached_stream(tiny):
    options = {"augment": ("flip",)}
    cached = train_iterator(load(config(tiny, **options)), batch_size=9, seed=3)
    workers = load(config(tiny, cache="none", workers=2, **options))
    streamed = train_iterator(workers, batch_size=9, seed=3, start_step=2)
    expected = [next(cached) for _ in range(8)]
    for batch in expected[2:5]:
        np.testing.assert_array_equal(next(streamed)["image"], batch["image"])
    state = json.loads(json.dumps(streamed.get_state()))
    streamed.close()
    # The state does not depend on the number of workers.
    resumed = train_iterator(load(config(tiny, cache="none", **options)), batch_size=9, seed=3)
    resumed.set_state(state)
    for batch in expected[5:]:
        np.testing.assert_array_equal(next(resumed)["image"], batch["image"])


def test_sizes_that_differ_need_image_size(ragged):
    for cache in ("memory", "none"):
        dataset = load(config(ragged, name="ragged", cache=cache, mean=(0.5,), std=(0.5,)))
        message = error_of(lambda dataset=dataset: everything(dataset, "train"), ValueError)
        assert "differ in size" in message
        assert "give image_size" in message


def test_resize_and_centre_crop_keeps_grey_images_grey(ragged):
    dataset = load(config(ragged, name="ragged", image_size=(10, 10)))
    assert dataset.info.image_shape == (10, 10, 1)
    images, labels = everything(dataset, "test")
    truth = {}
    for image, label in zip(ragged.images["test"], ragged.labels["test"], strict=True):
        height, width = image.shape[:2]
        scale = 10 / min(height, width)
        scaled = Image.fromarray(image[..., 0]).resize(
            (round(width * scale), round(height * scale)), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(scaled)
        top, left = (pixels.shape[0] - 10) // 2, (pixels.shape[1] - 10) // 2
        truth[pixels[top : top + 10, left : left + 10].tobytes()] = label
    assert [truth.pop(image.tobytes()) for image in images] == labels.tolist()


def odd_features(**more):
    return tfds.features.FeaturesDict(
        {
            "picture": tfds.features.Image(shape=(4, 4, 3)),
            "kind": tfds.features.ClassLabel(num_classes=2),
            **more,
        }
    )


def odd_examples(count=4):
    images = make_images([(4, 4)] * count, 3, seed=5)
    return [{"picture": encode(image), "kind": i % 2} for i, image in enumerate(images)]


def test_features_of_other_names(tmp_path):
    examples = odd_examples()
    prepare(tmp_path, "odd", odd_features(), {"train": examples, "test": examples})
    dataset = load(DataConfig(name="odd", data_dir=str(tmp_path), cache="memory"))
    assert dataset.info.class_names == ("0", "1")
    assert sorted(everything(dataset, "train")[1]) == [0, 0, 1, 1]


def test_two_images_must_be_told_apart(tmp_path):
    features = odd_features(mask=tfds.features.Image(shape=(4, 4, 1)))
    mask = np.full((4, 4, 1), 7, np.uint8)

    def examples():
        return [example | {"mask": encode(mask)} for example in odd_examples()]

    prepare(tmp_path, "masks", features, {"train": examples(), "test": examples()})
    options = {"name": "masks", "data_dir": str(tmp_path), "cache": "memory"}
    message = error_of(lambda: load(DataConfig(**options)), ValueError)
    assert "2 features of type Image" in message
    assert "image_key" in message
    message = error_of(lambda: load(DataConfig(image_key="maks", **options)), ValueError)
    assert "did you mean 'mask'" in message
    dataset = load(DataConfig(image_key="mask", **options))
    assert (everything(dataset, "train")[0] == mask).all()


def test_hidden_labels_are_refused(tmp_path):
    features = odd_features()
    hidden = [example | {"kind": -1} for example in odd_examples()]
    prepare(tmp_path, "hidden", features, {"train": odd_examples(), "test": hidden})
    dataset = load(DataConfig(name="hidden", data_dir=str(tmp_path), cache="memory"))
    message = error_of(lambda: dataset.source("test"), ValueError)
    assert "split 'test'" in message
    assert "label -1 is not in 0 .. 1" in message


def test_a_damaged_image_is_named(tmp_path):
    cut = io.BytesIO(encode(make_images([(40, 40)], 3, 0)[0]).getvalue()[:900])
    bad = {"picture": cut, "kind": 0}
    features = tfds.features.FeaturesDict(
        {
            "picture": tfds.features.Image(shape=(None, None, 3)),
            "kind": tfds.features.ClassLabel(num_classes=2),
        }
    )
    prepare(tmp_path, "bad", features, {"train": [bad], "test": odd_examples()})
    options = {"image_size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    dataset = load(DataConfig(name="bad", data_dir=str(tmp_path), cache="memory", **options))
    message = error_of(lambda: dataset.source("train"), ValueError)
    assert "record 0 of split 'train'" in message
    assert str(tmp_path) in message


def test_not_prepared(tmp_path):
    message = error_of(
        lambda: load(DataConfig(name="cifar100", data_dir=str(tmp_path))), FileNotFoundError
    )
    assert f"not prepared in {tmp_path / 'cifar100'}" in message
    assert f"tfds build cifar100 --file_format=array_record --data_dir={tmp_path}" in message
    assert list(tmp_path.iterdir()) == []


def test_half_prepared_is_not_prepared(tmp_path):
    (tmp_path / "cifar100" / "incomplete.X_3.0.2").mkdir(parents=True)
    (tmp_path / "cifar100" / "3.0.2").mkdir()
    error_of(lambda: load(DataConfig(name="cifar100", data_dir=str(tmp_path))), FileNotFoundError)


def test_the_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    message = error_of(lambda: load(DataConfig(name="mnist")), FileNotFoundError)
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cifra10", "did you mean 'cifar10'"), ("tinny", "did you mean 'tiny'"), ("digit", "digits")],
)
def test_unknown_name(tiny, name, hint):
    message = error_of(lambda: load(config(tiny, name=name)), ValueError)
    assert f"unknown data set '{name}'" in message
    assert hint in message
    assert str(tiny.data_dir) in message


@pytest.mark.parametrize("name", ["../x", "a b", "tiny/..", "/etc"])
def test_names_are_not_paths(tiny, name):
    assert "name must be" in error_of(lambda: load(config(tiny, name=name)), ValueError)


def test_unknown_split(tiny):
    message = error_of(lambda: load(config(tiny, eval_split="tests")), ValueError)
    assert "unknown split of data set 'tiny' 'tests'; did you mean 'test'?" in message
    error_of(lambda: load(config(tiny, train_split="train[:x]")), ValueError)


def test_versions_and_configurations(tmp_path):
    sizes = {"train": [(3, 3)] * 4, "test": [(3, 3)] * 4}
    prepare_plain(tmp_path, "many", sizes=sizes, version="1.9.0", seed=1)
    newest = prepare_plain(tmp_path, "many", sizes=sizes, version="1.10.0", seed=2)

    def version_of(name):
        return load(DataConfig(name=name, data_dir=str(tmp_path), cache="memory")).info.version

    assert version_of("many") == "1.10.0"
    assert version_of("many:1.9.0") == "1.9.0"
    message = error_of(lambda: version_of("many:1.8.0"), ValueError)
    assert "unknown version of data set 'many' '1.8.0'" in message
    # The same folders one level deeper, as configurations.
    for name in ("small", "large"):
        (tmp_path / "deep" / name).mkdir(parents=True)
        (newest.data_dir / "many" / "1.10.0").rename(tmp_path / "deep" / name / "1.10.0")
        if name == "small":
            assert version_of("deep") == "1.10.0"
            prepare_plain(tmp_path, "many", sizes=sizes, version="1.10.0", seed=3)
    assert "deep/large, deep/small" in error_of(lambda: version_of("deep"), ValueError)
    assert version_of("deep/small") == "1.10.0"


def test_missing_shard(tmp_path):
    prepare_plain(tmp_path, sizes={"train": [(3, 3)] * 4, "test": [(3, 3)] * 4})
    shard = next((tmp_path / "tiny" / "1.0.0").glob("tiny-train*"))
    shard.unlink()
    options = {"name": "tiny", "data_dir": str(tmp_path), "cache": "memory"}
    message = error_of(lambda: load(DataConfig(**options)), FileNotFoundError)
    assert shard.name in message


def test_another_file_format(tmp_path):
    prepare_plain(tmp_path, sizes={"train": [(3, 3)] * 4, "test": [(3, 3)] * 4})
    path = tmp_path / "tiny" / "1.0.0" / "dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    message = error_of(lambda: load(DataConfig(name="tiny", data_dir=str(tmp_path))), ValueError)
    assert "not prepared as array_record" in message
    assert f"tfds convert_format --dataset_version_dir={path.parent}" in message


def test_sixteen_bit_images_are_refused(tmp_path):
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(4, 4, 1), dtype=np.uint16),
            "label": tfds.features.ClassLabel(num_classes=2),
        }
    )
    deep = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(deep, "png")
    examples = [{"image": io.BytesIO(deep.getvalue()), "label": 0}]
    prepare(tmp_path, "deep", features, {"train": examples, "test": examples})
    message = error_of(lambda: load(DataConfig(name="deep", data_dir=str(tmp_path))), ValueError)
    assert "images must be uint8" in message


def test_a_view_on_classes_reads_labels_without_decoding(tiny, tmp_path, monkeypatch):
    wanted = tmp_path / "list.txt"
    wanted.write_text("\n".join(reversed(CLASSES[1:])))
    options = {"cache": "none", "cache_dir": str(tmp_path), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    decoded = []
    original = decode.decode_image
    monkeypatch.setattr(
        decode, "decode_image", lambda *a, **k: decoded.append(1) or original(*a, **k)
    )
    dataset = load(config(tiny, class_list=str(wanted), **options))
    assert len(decoded) <= 1  # the first image, for its size
    assert dataset.info.class_names == CLASSES[1:]
    for split in ("train", "test"):
        images, labels = everything(dataset, split)
        pairs = zip(tiny.images[split], tiny.labels[split], strict=True)
        expected = [(image, label - 1) for image, label in pairs if label > 0]
        truth = {image.tobytes(): label for image, label in expected}
        assert [truth.pop(image.tobytes()) for image in images] == labels.tolist()
        assert not truth
