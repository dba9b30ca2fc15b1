"""Images in folders and lists: real files, the same images and labels as were written."""

import shutil

import numpy as np
import pytest
from PIL import Image

from cumulant_jax.data import ArrayCollection, DataConfig, load, train_iterator

CLASSES = ("cat", "dog", "owl")


def picture(seed, size=(12, 10)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


@pytest.fixture
def photos(tmp_path):
    """data_dir with train and val, as folders and as lists; label and pixels of every image."""
    truth = {"train": [], "val": []}
    for split, each in (("train", 4), ("val", 2)):
        rows = ["path,label"]
        for label, name in enumerate(CLASSES):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(each):
                pixels = picture(100 * label + number + 10_000 * (split == "val"))
                Image.fromarray(pixels).save(folder / f"{number}.png")
                rows.append(f"{split}/{name}/{number}.png,{name}")
                truth[split].append((label, pixels))
        (tmp_path / f"{split}.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path, truth


def config(root, name, **options):
    return DataConfig(name=name, data_dir=str(root), cache="none", **options)


@pytest.mark.parametrize("name", ["folder", "list"])
def test_every_image_has_its_label(photos, name):
    root, truth = photos
    dataset = load(config(root, name))
    info = dataset.info
    assert (info.class_names, info.num_train, info.num_eval) == (CLASSES, 12, 6)
    assert info.image_shape == (12, 10, 3)
    for split, expected in truth.items():
        source = dataset.source(split)
        images, labels = source.gather(np.arange(len(source)))
        assert labels.tolist() == [label for label, _ in expected]
        np.testing.assert_array_equal(images, [pixels for _, pixels in expected])


@pytest.mark.parametrize("name", ["folder", "list"])
def test_workers_and_the_cache_give_the_same_batches(photos, name, tmp_path):
    root, _ = photos
    batches = []
    for options in ({"cache": "none"}, {"cache": "none", "workers": 2}, {"cache": "disk"}):
        given = DataConfig(
            name=name, data_dir=str(root), cache_dir=str(tmp_path / "cache"), **options
        )
        iterator = train_iterator(load(given), batch_size=5, seed=3)
        batches.append([next(iterator) for _ in range(3)])
        iterator.close()
    for other in batches[1:]:
        for batch, expected in zip(other, batches[0], strict=True):
            np.testing.assert_array_equal(batch["image"], expected["image"])
            np.testing.assert_array_equal(batch["label"], expected["label"])


def test_labels_that_are_numbers_are_in_their_order(tmp_path):
    names = ["10", "9", "100"]
    rows = ["path,label", *(f"{name}.png,{name}" for name in names)]
    for name in names:
        Image.fromarray(picture(int(name))).save(tmp_path / f"{name}.png")
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("\n".join(rows))
    dataset = load(config(tmp_path, "list"))
    assert dataset.info.class_names == ("9", "10", "100")
    assert dataset.source("train").gather(np.arange(3))[1].tolist() == [1, 0, 2]


def broken(root):
    (root / "train" / "dog" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")


def other_size(root):
    Image.fromarray(picture(1, (9, 9))).save(root / "train" / "dog" / "1.png")


@pytest.mark.parametrize("name", ["folder", "list"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken, r"train/dog/1.png cannot be read as an image \(.*\); replace it, or delete it"),
        (other_size, r"train/dog/1.png is 9x9, the first image 12x10: give image_size"),
    ],
)
def test_a_bad_image_is_named(photos, name, damage, message):
    root, _ = photos
    damage(root)
    source = load(config(root, name, mean=(0.5,) * 3, std=(0.5,) * 3)).source("train")
    with pytest.raises(ValueError, match=message):
        source.gather(np.arange(len(source)))


def empty(root):
    (root / "train" / "eel").mkdir()


def stranger(root):
    (root / "val" / "owls").mkdir()
    Image.fromarray(picture(1)).save(root / "val" / "owls" / "1.png")


def no_val(root):
    shutil.rmtree(root / "val")


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (empty, {}, r"class 'eel': .*train/eel holds no images"),
        (stranger, {}, r"which the training split has not 'owls'; did you mean 'owl'"),
        (None, {"eval_split": "vals"}, r"unknown split of .* 'vals'; did you mean 'val'"),
        (no_val, {}, "eval_split must be given: .* has the splits train, none of them called test"),
        (None, {"num_classes": 4}, "num_classes is 4, but .* has 3 classes"),
        (None, {"class_list": "imagenet100"}, "unknown class of .* in class_list 'imagenet100'"),
    ],
)
def test_a_wrong_folder_is_named(photos, damage, options, message):
    root, _ = photos
    if damage:
        damage(root)
    with pytest.raises(ValueError, match=message):
        load(config(root, "folder", **options))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ("file,label\na.png,cat", ValueError, r"got the columns \['file', 'label'\]"),
        ("path,label\n", ValueError, "train.csv has no rows"),
        (
            "path,label\ntrain/cat/0.png,",
            ValueError,
            "train.csv, line 2: a path or a label is empt",
        ),
        ("path,label\nno.png,cat", FileNotFoundError, "train.csv, line 2: there is no image"),
    ],
)
def test_a_wrong_list_is_named(photos, rows, error, message):
    root, _ = photos
    (root / "train.csv").write_text(rows)
    with pytest.raises(error, match=message):
        load(config(root, "list"))


def test_a_missing_place_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="data_dir: there is no folder"):
        load(config(tmp_path / "no", "folder"))
    with pytest.raises(FileNotFoundError, match=r"holds no train\.csv"):
        load(config(tmp_path, "list"))
    with pytest.raises(ValueError, match="data_dir must name the folder of name='folder'"):
        load(DataConfig(name="folder"))


@pytest.mark.parametrize("name", ["folder", "list"])
def test_some_classes_are_a_data_set_of_their_own(photos, tmp_path, name):
    root, truth = photos
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("# in another order\nowl\n\ncat\n")
    options = {"class_list": str(wanted), "cache_dir": str(tmp_path / "cache"), "num_classes": 2}
    for _ in range(2):  # the second time from the labels that were kept
        dataset = load(config(root, name, **options))
        assert dataset.info.class_names == ("cat", "owl")
        assert (dataset.info.num_train, dataset.info.num_eval) == (8, 4)
        source = dataset.source("val")
        images, labels = source.gather(np.arange(len(source)))
        expected = [(label, pixels) for label, pixels in truth["val"] if label != 1]
        assert labels.tolist() == [{0: 0, 2: 1}[label] for label, _ in expected]
        np.testing.assert_array_equal(images, [pixels for _, pixels in expected])


def test_lists_that_are_wrong_are_named(photos, tmp_path):
    root, _ = photos
    with pytest.raises(FileNotFoundError, match="unknown class list 'imagenet10'; did you mean"):
        load(config(root, "folder", class_list="imagenet10"))
    for text, message in (("# none\n", "holds no names"), ("cat\ncat\n", "holds cat twice")):
        (tmp_path / "list.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(config(root, "folder", class_list=str(tmp_path / "list.txt")))


def test_arrays_are_a_data_set():
    images = np.stack([picture(i) for i in range(6)])
    labels = np.array([0, 1, 2, 0, 1, 2])
    collection = ArrayCollection({"train": (images, labels), "val": (images[:2], labels[:2])})
    dataset = load(DataConfig(name="mine"), collection=collection)
    assert (dataset.info.num_classes, dataset.info.num_train, dataset.info.num_eval) == (3, 6, 2)
    np.testing.assert_array_equal(dataset.source("train").gather(np.array([4]))[0][0], images[4])
    for splits, error, message in (
        ({"train": (images.astype(float), labels)}, TypeError, "images must be uint8"),
        ({"train": (images, labels[:3])}, TypeError, "labels must be 6 integers"),
        ({"train": (images, labels - 1)}, ValueError, "example 0: label -1 is not in 0 .. 1"),
    ):
        with pytest.raises(error, match=message):
            ArrayCollection(splits)
