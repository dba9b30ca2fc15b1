"""Small TFDS data sets in the real format (array_record), written without TensorFlow."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

CLASSES = ("circle", "square", "star")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared data set with what went into it."""

    data_dir: Path
    images: dict[str, list[np.ndarray]]
    labels: dict[str, np.ndarray]


def make_images(sizes, channels, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (h, w, channels), dtype=np.uint8) for h, w in sizes]


def encode(image, kind="png"):
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(buffer, kind)
    return io.BytesIO(buffer.getvalue())


def prepare(data_dir, name, features, examples, *, supervised=None, version="1.0.0"):
    """Writes a data set; `examples` maps each split to its list of example dicts."""

    class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        # For a class of a package TFDS wants importlib_resources, which it does not install.
        __module__ = "__main__"

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=supervised
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in examples}

        def _generate_examples(self, split):
            yield from enumerate(examples[split])

    Local.name = name
    Local.pkg_dir_path = Path(data_dir)
    shards = min(2, *map(len, examples.values()))
    builder = Local(data_dir=data_dir, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
    return Path(builder.data_dir)


def prepare_plain(data_dir, name="tiny", *, sizes, channels=3, seed=0, shape=None, version="1.0.0"):
    """Writes a data set with an image and a label; TFDS puts the records into its own order."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=shape or (None, None, channels)),
            "label": tfds.features.ClassLabel(names=CLASSES),
            "number": np.int64,
        }
    )
    images = {
        split: make_images(split_sizes, channels, seed + i)
        for i, (split, split_sizes) in enumerate(sizes.items())
    }
    labels = {split: np.arange(len(part)) * 7 % 3 for split, part in images.items()}
    examples = {
        split: [
            {"image": encode(image), "label": CLASSES[label], "number": i}
            for i, (image, label) in enumerate(zip(images[split], labels[split], strict=True))
        ]
        for split in images
    }
    prepare(data_dir, name, features, examples, supervised=("image", "label"), version=version)
    return Prepared(Path(data_dir), images, labels)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """37 + 11 RGB images of 12 x 10 pixels in 3 classes."""
    return prepare_plain(
        tmp_path_factory.mktemp("tfds"),
        sizes={"train": [(12, 10)] * 37, "test": [(12, 10)] * 11},
        shape=(12, 10, 3),
    )


@pytest.fixture(scope="session")
def ragged(tmp_path_factory):
    """Grey images of different sizes."""
    sizes = [(20, 30), (31, 17), (16, 16), (40, 23)]
    return prepare_plain(
        tmp_path_factory.mktemp("ragged"),
        "ragged",
        sizes={"train": sizes * 3, "test": sizes},
        channels=1,
        seed=10,
    )
