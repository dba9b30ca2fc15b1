import dataclasses
import json

import pytest

from cumulant_jax.training import ExperimentConfig, ModelConfig, difference


def test_a_config_survives_json():
    config = ExperimentConfig(seed=3).replace(
        model__attention="linear+softmax+tssa",
        data__augment=("flip", "crop"),
        data__image_size=16,
        model__options={"pool": "mean", "depth": 3},
    )
    assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.data.augment == ("flip", "crop")
    assert config.model.attention_kinds == ("linear", "softmax", "tssa")


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ExperimentConfig().seed = 1  # type: ignore[misc]


def test_an_int_serves_as_a_float_and_a_list_as_a_tuple():
    config = ExperimentConfig.from_dict(
        {"optimizer": {"learning_rate": 1}, "data": {"augment": ["flip"]}}
    )
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.data.augment == ("flip",)
    assert ModelConfig(attention=("linear", "tssa")).attention == "linear+tssa"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"batchsize": 3}, ValueError, "unknown config key 'batchsize'; did you mean 'batch_size'"),
        ({"learning_rate": 3.0}, ValueError, "did you mean 'optimizer.learning_rate'"),
        ({"optimizer": {"learnin_rate": 3.0}}, ValueError, "mean 'optimizer.learning_rate'"),
        ({"batch_size": "64"}, TypeError, "batch_size: got '64' .str., expected int"),
        ({"batch_size": True}, TypeError, "batch_size: got True .bool., expected int"),
        ({"batch_size": 0}, ValueError, "batch_size: got 0, expected"),
        ({"batch_size": 64.0}, TypeError, "batch_size"),
        ({"ema_decay": 1.0}, ValueError, "ema_decay"),
        ({"ema_decay": "0.9"}, TypeError, "expected float or None"),
        ({"seed": -1}, ValueError, "seed"),
        ({"total": 0}, ValueError, "total"),
        ({"total": "3 weeks"}, ValueError, "total: got '3 weeks'"),
        ({"gradient_accumulation": 3}, ValueError, "a divisor of batch_size, 64"),
        ({"optimizer": {"b2": 1.0}}, ValueError, "optimizer.b2"),
        ({"optimizer": {"warmup": "x"}}, ValueError, "optimizer.warmup"),
        ({"optimizer": 3}, TypeError, "optimizer: got 3, expected a section"),
        ({"mixing": {"mixup": -0.1}}, ValueError, "mixing.mixup"),
        ({"model": {"attention": "cumulent3"}}, ValueError, "did you mean 'cumulant3'"),
        ({"model": {"name": "vit_nona2"}}, ValueError, "did you mean 'vit_nano2'"),
        ({"model": {"options": {"poll": "mean"}}}, ValueError, "did you mean 'model.options.pool'"),
        ({"model": {"dtype": "bfloat"}}, ValueError, "did you mean 'bfloat16'"),
    ],
)
def test_wrong_values_are_named_with_what_was_expected(values, error, message):
    with pytest.raises(error, match=message) as caught:
        ExperimentConfig.from_dict(values)
    assert "\n" not in str(caught.value)


def test_difference_lists_each_changed_key():
    old = ExperimentConfig().replace(model__options={"pool": "mean"})
    new = ExperimentConfig(batch_size=32).replace(
        optimizer__clip_norm=None, model__options={"depth": 2}
    )
    assert difference(old, new) == [
        "batch_size: 64 → 32",
        "model.options.pool: mean → (absent)",
        "optimizer.clip_norm: 1.0 → None",
        "model.options.depth: (absent) → 2",
    ]
    assert difference(old, old) == []


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("attention", "use model.attention"),
        ("dtype", "use model.dtype"),
        ("image_size", "use data.image_size"),
        ("num_classes", "data.name"),
        ("channels", "data.name"),
    ],
)
def test_an_option_that_has_its_own_place_is_refused(option, place):
    with pytest.raises(ValueError, match=rf"model\.options\.{option}: .*{place}"):
        ExperimentConfig().replace(model__options={option: "linear"})
