"""Validation of DataConfig."""

import dataclasses
import json
import pathlib

import pytest

from cumulant_jax.data import DataConfig

NAN, INF = float("nan"), float("inf")


def test_survives_json():
    config = DataConfig(name="x", image_size=[3, 4], augment=["flip"], mean=[0.5], std=[0.25])
    assert DataConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert config.image_size == (3, 4)
    assert config.augment == ("flip",)


def test_folders_may_be_paths():
    config = DataConfig(data_dir=pathlib.Path("a"), cache_dir=pathlib.Path("b"))
    assert (config.data_dir, config.cache_dir) == ("a", "b")


def test_is_frozen_and_hashable():
    config = DataConfig(image_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "x"  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(config) == hash(DataConfig(image_size=(8, 8)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": ""}, TypeError, "name must be a non-empty string, got ''"),
        ({"train_split": None}, TypeError, "train_split must be a non-empty string, got None"),
        ({"cache": "disc"}, ValueError, "unknown cache 'disc'; did you mean 'disk'?"),
        ({"image_size": 0}, ValueError, "image_size must be a positive int"),
        ({"image_size": (1, 2, 3)}, ValueError, "image_size must be a positive int"),
        ({"image_size": True}, ValueError, "image_size must be a positive int"),
        ({"image_size": (True, 8)}, ValueError, "image_size must be a positive int"),
        ({"augment": 3}, TypeError, "augment must be a tuple of strings, got 3"),
        ({"augment": "flip"}, TypeError, "augment must be a tuple of strings"),
        ({"augment": ("flop",)}, ValueError, "unknown augmentation 'flop'"),
        ({"mean": (0.5,)}, ValueError, "mean and std belong together"),
        ({"mean": 0.5, "std": 0.5}, TypeError, "mean must hold one number per channel, got 0.5"),
        ({"mean": (0.5,), "std": (0.0,)}, ValueError, "std must be positive"),
        ({"mean": (NAN,), "std": (0.5,)}, ValueError, "mean must be finite, got nan"),
        ({"mean": (0.5,), "std": (NAN,)}, ValueError, "std must be finite, got nan"),
        ({"mean": (0.5,), "std": (INF,)}, ValueError, "std must be finite, got inf"),
        ({"mean": ("a",), "std": (0.5,)}, TypeError, "mean must hold numbers, one per channel, go"),
        ({"mean": (True,), "std": (0.5,)}, TypeError, "mean must hold numbers"),
        ({"data_dir": 3}, TypeError, "data_dir must be None or a non-empty string, got 3"),
        ({"cache_dir": ["x"]}, TypeError, "cache_dir must be None or a non-empty string"),
        ({"image_key": 3}, TypeError, "image_key must be None or a non-empty string, got 3"),
        ({"threads": 0}, ValueError, "threads must be an integer of at least 1, got 0"),
        ({"prefetch": 0}, ValueError, "prefetch must be an integer of at least 1, got 0"),
        ({"workers": -1, "cache": "none"}, ValueError, "workers must be an integer"),
        ({"workers": 2}, ValueError, "workers=2 needs cache='none', got cache='disk'"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error) as caught:
        DataConfig(**options)
    assert message in str(caught.value)
