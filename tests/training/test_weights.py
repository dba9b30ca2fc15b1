import json

import jax
import numpy as np
import pytest
from safetensors import safe_open

from cumulant_jax.training import (
    SilentReporter,
    build,
    load_weights,
    save_weights,
    train,
)
from experiments import cli, evaluate, export


def test_what_is_read_is_what_was_written_under_plain_names(tiny, tmp_path, same):
    experiment = build(tiny())
    params = experiment.create_state().params
    statistics = {"norm": {"mean": np.arange(6, dtype=np.float32).reshape(2, 3).T}}
    file = tmp_path / "weights.safetensors"
    save_weights(file, params, statistics, metadata={"step": "3"})
    loaded = load_weights(file)
    same({"norm": loaded["norm"] | statistics["norm"]}, {"norm": params["norm"] | loaded["norm"]})
    with safe_open(file, "numpy") as content:
        assert content.metadata() == {"step": "3"}
        assert "blocks.0.attention.qkv.kernel" in content.keys()  # noqa: SIM118
        np.testing.assert_array_equal(content.get_tensor("norm.mean"), statistics["norm"]["mean"])
    del loaded["norm"]["mean"]
    same(loaded, jax.device_get(params))
    assert list(tmp_path.iterdir()) == [file]


def test_names_that_clash_and_files_that_are_none_are_errors(tmp_path):
    with pytest.raises(ValueError, match="model_state: a is among the parameters too"):
        save_weights(tmp_path / "w", {"a": np.ones(2)}, {"a": np.ones(2)})
    (tmp_path / "other").write_text("no weights")
    with pytest.raises(ValueError, match="other' cannot be read"):
        load_weights(tmp_path / "other")


@pytest.mark.parametrize("parameters", ["auto", "raw"])
def test_the_export_of_a_run_gives_its_evaluation(tiny, tmp_path, parameters, capsys):
    config = tiny(ema_decay=0.5)
    train(config, tmp_path / "run", reporter=SilentReporter())
    file = tmp_path / "weights.safetensors"
    arguments = ["--directory", str(tmp_path / "run"), "--parameters", parameters]
    assert cli.run(evaluate.main, evaluate.make_parser(), arguments) == 0
    expected = json.loads(capsys.readouterr().out)["loss"]
    assert cli.run(export.main, export.make_parser(), [*arguments, "--output", str(file)]) == 0
    experiment = build(config)
    state = experiment.create_state().replace(params=load_weights(file))
    scores = experiment.evaluate(experiment.eval_step(), state, ema=False)
    assert scores["loss"] == pytest.approx(expected, rel=1e-6)
    with safe_open(file, "numpy") as content:
        metadata = content.metadata()
    assert metadata["parameters"] == ("ema" if parameters == "auto" else "raw")
    assert json.loads(metadata["config"]) == config.to_dict()
