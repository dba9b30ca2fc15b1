from pathlib import Path

import pytest

from cumulant_jax.training import (
    ExperimentConfig,
    config_arguments,
    default_config_dict,
    from_config_dict,
    load_config,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def write(tmp_path, *lines):
    file = tmp_path / "config.py"
    body = "\n    ".join(lines)
    file.write_text(
        "from cumulant_jax.training import default_config_dict\n\n"
        f"def get_config():\n    config = default_config_dict()\n    {body}\n    return config\n"
    )
    return str(file)


def test_the_default_config_dict_is_the_default_config():
    assert from_config_dict(default_config_dict()) == ExperimentConfig()


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("--config.batch_size=256", "batch_size", 256),
        ("--config.total=300", "total", "300"),
        ("--config.total=3 epochs", "total", "3 epochs"),
        ("--config.ema_decay=0.99", "ema_decay", 0.99),
        ("--config.eval_batch_size=7", "eval_batch_size", 7),
        ("--config.optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("--config.optimizer.warmup=5 epochs", "optimizer.warmup", "5 epochs"),
        ("--config.data.augment=('flip',)", "data.augment", ("flip",)),
        ("--config.data.image_size=16", "data.image_size", (16, 16)),
        ("--config.data.data_dir=/data", "data.data_dir", "/data"),
        ("--config.model.options.pool=mean", "model.options.pool", "mean"),
        ("--config.model.options.dropout=0.1", "model.options.dropout", 0.1),
        ("--config.model.options.remat=True", "model.options.remat", True),
        ("-config.seed=4", "seed", 4),
    ],
)
def test_every_kind_of_key_can_be_set_on_the_command_line(tmp_path, override, key, expected):
    value = load_config(write(tmp_path), [override])
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["config.batchsize = 3"], "'batchsize'; did you mean 'batch_size'"),
        (["config.optimizer.learnin_rate = 3.0"], "did you mean 'learning_rate'"),
        (["config.model.atention = 'linear'"], "did you mean 'attention'"),
        (["config.learning_rate = 3.0"], "did you mean 'optimizer.learning_rate'"),
        (["config['batchsize'] = 3"], "did you mean 'batch_size'"),
        (["config.update({'batchsize': 3})"], "did you mean 'batch_size'"),
        (["config.model.options.poll = 'mean'"], "did you mean 'model.options.pool'"),
        (["config.model.attention = 'cumulent3'"], "did you mean 'cumulant3'"),
    ],
)
def test_a_misspelt_key_in_a_file_is_one_line_with_the_nearest(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--config.batchsize=3", "did you mean 'batch_size'"),
        ("--config.optimizer.learnin_rate=3", "did you mean 'optimizer.learning_rate'"),
        ("--config.learning_rate=3", "did you mean 'optimizer.learning_rate'"),
        ("--config.model.options.poll=mean", "did you mean 'model.options.pool'"),
        ("--config.batch_size.x=3", "unknown config key 'batch_size.x'"),
        ("--config.batch_size=many", "batch_size.*'many'"),
        ("--config.model.attention=cumulent3", "did you mean 'cumulant3'"),
    ],
)
def test_a_wrong_override_is_one_line_with_the_nearest(tmp_path, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(write(tmp_path), [override])
    assert "\n" not in str(caught.value)


def test_a_missing_config_file_is_named_with_the_nearest(tmp_path):
    write(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"confg\.py'; did you mean .*config\.py"):
        load_config(str(tmp_path / "confg.py"))


def test_config_arguments():
    parsed = config_arguments("variant=ti4, attention=cumulant3", attention="softmax", variant="x")
    assert (parsed.attention, parsed.variant) == ("cumulant3", "ti4")
    assert config_arguments("", seed=3).seed == 3
    assert config_arguments("seed=5", seed=3).seed == 5
    with pytest.raises(ValueError, match="'attenton'; did you mean 'attention'"):
        config_arguments("attenton=linear", attention="softmax")
    with pytest.raises(ValueError, match="seed: got 'x', expected int"):
        config_arguments("seed=x", seed=0)
    with pytest.raises(ValueError, match="attention: got no value"):
        config_arguments("attention", attention="softmax")


@pytest.mark.parametrize(
    ("spec", "name", "attention"),
    [
        ("digits.py", "vit_nano2", "softmax"),
        ("digits.py:attention=tssa,seed=1", "vit_nano2", "tssa"),
        ("cifar10.py", "vit_nano4", "softmax"),
        ("cifar10.py:attention=cumulant3,variant=ti4", "vit_ti4", "cumulant3"),
        ("cifar10.py:variant=s4", "vit_s4", "softmax"),
    ],
)
def test_the_configs_of_the_project_load(spec, name, attention):
    config = load_config(str(CONFIGS / spec), ["--config.batch_size=256"])
    assert (config.model.name, config.model.attention) == (name, attention)
    assert config.batch_size == 256
    assert config.data.name == spec.partition(".")[0]
