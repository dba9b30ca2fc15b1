import pytest

from cumulant_jax.data import DataConfig, load
from cumulant_jax.data.described import describe


def test_a_data_set_that_is_there_is_described_by_its_files():
    config = DataConfig(name="digits")
    assert describe(config) == load(config).info


def test_one_that_is_not_is_described_as_published(tmp_path):
    config = DataConfig(name="imagenet2012", image_size=(224, 192), data_dir=str(tmp_path))
    info = describe(config)
    assert (info.num_classes, info.num_train, info.num_eval) == (1000, 1_281_167, 50_000)
    assert info.image_shape == (224, 192, 3)
    assert describe(DataConfig(name="cifar10", data_dir=str(tmp_path))).image_shape == (32, 32, 3)


def test_what_is_missing_is_named(tmp_path):
    where = str(tmp_path)
    with pytest.raises(ValueError, match=r"data.image_size: got None, .* images of food101 differ"):
        describe(DataConfig(name="food101", data_dir=where))
    with pytest.raises(FileNotFoundError, match="unknown data set 'mnist'"):
        describe(DataConfig(name="mnist", data_dir=where))
