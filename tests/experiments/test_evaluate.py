import json

import pytest

from cumulant_jax.training import ExperimentConfig, SilentReporter, read_rows, train
from cumulant_jax.training.config import OptimizerConfig
from experiments import cli, evaluate


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = ExperimentConfig(
        batch_size=32,
        total="12 steps",
        evaluate_every="4 steps",
        checkpoint_every="4 steps",
        keep_last=3,
        ema_decay=0.5,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup="2 steps"),
    ).replace(
        model__name="vit_nano4",
        model__options={"dim": 16, "depth": 1, "heads": 2, "pool": "mean"},
    )
    directory = tmp_path_factory.mktemp("run")
    train(config, directory, reporter=SilentReporter())
    return directory


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(directory))


def run(*arguments):
    return cli.run(evaluate.main, evaluate.make_parser(), [str(word) for word in arguments])


def logged(directory):
    rows = read_rows(directory / "metrics.jsonl")
    return {row["step"]: row for row in rows if "eval/loss" in row}


@pytest.mark.parametrize("batch_size", [1, 50, 1000])
@pytest.mark.parametrize("step", [4, 8, 12])
def test_a_checkpoint_has_the_metrics_that_were_logged(
    directory, tmp_path, capfd, step, batch_size
):
    file = tmp_path / "result.json"
    code = run(
        *("--directory", directory, "--checkpoint", step),
        *("--batch-size", batch_size, "--output", file),
    )
    output, errors = capfd.readouterr()
    assert (code, errors) == (0, "")
    result = json.loads(file.read_text())
    assert json.loads(output) == result
    assert result["step"] == step
    assert result["num_examples"] == 360
    assert result["parameters"] == "ema"
    assert result["accuracy"] == pytest.approx(logged(directory)[step]["eval/accuracy"], abs=1e-9)
    assert result["loss"] == pytest.approx(logged(directory)[step]["eval/loss"], rel=1e-5)


def test_the_best_and_the_last(directory, tmp_path, capfd):
    scores = {step: row["eval/accuracy"] for step, row in logged(directory).items()}
    best = max(scores, key=lambda step: (scores[step], step))
    assert run("--directory", directory) == 0
    assert json.loads(capfd.readouterr().out)["step"] == max(scores)
    assert run("--directory", directory, "--checkpoint", "best") == 0
    assert json.loads(capfd.readouterr().out)["step"] == best
    assert json.loads((directory / f"evaluation-{best}.json").read_text())["step"] == best
    assert run("--directory", directory, "--checkpoint", "last", "--output", tmp_path / "x") == 0
    assert json.loads(capfd.readouterr().out)["step"] == 12


def test_raw_parameters_are_others_than_the_average(directory, tmp_path, capfd):
    losses = {}
    for parameters in ("raw", "ema"):
        code = run("--directory", directory, "--parameters", parameters, "--output", tmp_path / "x")
        assert code == 0
        result = json.loads(capfd.readouterr().out)
        assert result["parameters"] == parameters
        losses[parameters] = result["loss"]
    assert losses["raw"] != losses["ema"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--directory", "{tmp}/none"], "there is no run in"),
        (["--directory", "{run}", "--checkpoint", "5"], "one of the steps 4, 8, 12"),
        (["--directory", "{run}", "--checkpoint", "bst"], "expected 'best'"),
        (["--directory", "{run}", "--checkpoint", "²"], "--checkpoint: got '²'"),
        (["--directory", "{run}", "--checkpoint", "9" * 5000], "--checkpoint: got '99"),
        (["--directory", "{run}", "--batch-size", "0"], "expected at least 1"),
        (["--directory", "{run}", "--batch-size", "x"], "invalid int value: 'x'"),
        (["--directory", "{run}", "--parameters", "avg"], "invalid choice: 'avg'"),
        (["--directory", "{run}", "--checkpont", "last"], "did you mean '--checkpoint'"),
        (["--directory", "{run}", "--config.seed=3"], "takes its config from --directory"),
        ([], "required: --directory"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value)[:60],
)
def test_a_mistake_is_one_line_on_standard_error(directory, tmp_path, capfd, arguments, message):
    words = [w.replace("{tmp}", str(tmp_path)).replace("{run}", str(directory)) for w in arguments]
    assert run(*words) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
