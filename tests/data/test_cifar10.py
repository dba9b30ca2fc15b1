"""Real CIFAR-10, where it is prepared: published counts and statistics. Skipped elsewhere."""

import numpy as np
import pytest

from cumulant_jax.data import DataConfig, load, statistics, tfds_locate

try:
    tfds_locate.find("cifar10")
except (FileNotFoundError, ValueError) as error:
    pytest.skip(f"CIFAR-10 is not prepared: {error}", allow_module_level=True)


def test_info():
    info = load(DataConfig(name="cifar10", cache="none")).info
    assert (info.num_train, info.num_eval, info.num_classes) == (50_000, 10_000, 10)
    assert info.image_shape == (32, 32, 3)
    assert info.class_names[:3] == ("airplane", "automobile", "bird")
    assert info.mean == statistics.PUBLISHED["cifar10"][0]


def test_sampled_statistics_are_near_the_published_ones():
    source = load(DataConfig(name="cifar10", cache="none")).source("train")
    mean, std = statistics.channel_statistics(source)
    assert mean == pytest.approx(statistics.PUBLISHED["cifar10"][0], abs=0.015)
    assert std == pytest.approx(statistics.PUBLISHED["cifar10"][1], abs=0.015)


def test_classes_are_balanced_in_the_test_split():
    source = load(DataConfig(name="cifar10", cache="none")).source("test")
    _, labels = source.gather(np.arange(10_000))
    assert np.bincount(labels).tolist() == [1000] * 10
