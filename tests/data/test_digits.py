"""The embedded digits against scikit-learn's own arrays."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from cumulant_jax.data import DataConfig, load


@pytest.fixture(scope="module")
def digits():
    return load(DataConfig(name="digits"))


def everything(dataset, split):
    source = dataset.source(split)
    return source.gather(np.arange(len(source)))


def test_info(digits):
    info = digits.info
    assert (info.name, info.num_classes, info.image_shape) == ("digits", 10, (8, 8, 1))
    assert (info.num_train, info.num_eval) == (1437, 360)
    assert info.class_names == tuple("0123456789")


def test_both_splits_together_are_the_digits_with_their_labels(digits):
    truth = load_digits()
    expected = sorted(
        (tuple(image.ravel().astype(int)), int(label))
        for image, label in zip(truth.images, truth.target, strict=True)
    )
    got = []
    for split in ("train", "test"):
        images, labels = everything(digits, split)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int32
        pixels = np.rint(images[..., 0] / 255 * 16).astype(int)
        got += [(tuple(p.ravel()), int(y)) for p, y in zip(pixels, labels, strict=True)]
    assert sorted(got) == expected


def test_split_is_stratified_and_uses_the_value_range(digits):
    images, labels = everything(digits, "test")
    assert np.bincount(labels).tolist() == [36] * 10
    assert (images.min(), images.max()) == (0, 255)


def test_mean_and_std_are_those_of_the_training_pixels(digits):
    pixels = everything(digits, "train")[0].astype(np.float64) / 255
    assert digits.info.mean == pytest.approx((pixels.mean(),), abs=6e-5)
    assert digits.info.std == pytest.approx((pixels.std(),), abs=6e-5)


def test_image_size_resizes(digits):
    large = load(DataConfig(name="digits", image_size=(16, 12)))
    assert large.info.image_shape == (16, 12, 1)
    images, labels = everything(large, "test")
    small, small_labels = everything(digits, "test")
    assert images.shape == (360, 16, 12, 1)
    np.testing.assert_array_equal(labels, small_labels)
    # Doubled and cropped by two columns on each side: the block means stay near the old pixels.
    blocks = images[..., 0].reshape(360, 8, 2, 6, 2).mean(axis=(2, 4))
    assert np.corrcoef(blocks.ravel(), small[:, :, 1:7, 0].ravel())[0, 1] > 0.98


def test_unknown_split():
    with pytest.raises(ValueError, match=r"unknown split of data set 'digits' 'tset'.*'test'"):
        load(DataConfig(name="digits", eval_split="tset"))
