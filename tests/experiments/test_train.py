import json
import subprocess
import sys
from pathlib import Path

import pytest

from cumulant_jax.training import Interrupted, NonFiniteError, RunDirectory
from experiments import cli, train

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "--config.model.name=vit_nano4",
    "--config.model.options.dim=16",
    "--config.model.options.depth=1",
    "--config.model.options.heads=2",
    "--config.batch_size=32",
    "--config.optimizer.warmup=2 steps",
    "--config.total=6 steps",
]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path_factory):
    monkeypatch.chdir(REPOSITORY)
    directory = tmp_path_factory.getbasetemp() / "xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(directory))


def run(*arguments):
    return cli.run(train.main, train.make_parser(), [str(word) for word in arguments])


def test_training_in_two_parts_from_the_command_line(tmp_path, capfd):
    command = ["--config", "configs/digits.py:attention=cumulant3,seed=3", *SMALL]
    assert run(*command, "--directory", tmp_path, "--stop-after", "4 steps") == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    assert run(*command, "--directory", tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["completed"]) == (6, True)
    config = RunDirectory(tmp_path).config()
    assert (config.seed, config.batch_size, config.model.attention) == (3, 32, "cumulant3")
    output, errors = capfd.readouterr()
    assert "resuming at step 4" in output
    assert errors == ""
    # A finished run says so again.
    assert run(*command, "--directory", tmp_path) == 0
    assert capfd.readouterr().out.startswith("finished at step 6 after")
    # The same directory with another config is refused.
    assert run(*command, "--config.seed=4", "--directory", tmp_path) == 2
    assert "seed: 3 → 4" in capfd.readouterr().err


DIGITS = ("--config", "configs/digits.py")
CIFAR = ("--config", "configs/cifar10.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*DIGITS, "--config.batchsize=3"], "did you mean 'batch_size'"),
        ([*DIGITS, "--config.learning_rate=3"], "did you mean 'optimizer.learning_rate'"),
        ([*DIGITS, "--config.model.options.poll", "mean"], "did you mean 'model.options.pool'"),
        ([*DIGITS, "--config.model.attention=cumulent3"], "did you mean 'cumulant3'"),
        (["--config", "configs/digits.py:attention=cumulent3"], "did you mean 'cumulant3'"),
        (["--config", "configs/digits.py:atention=linear"], "did you mean 'attention'"),
        (["--config", "configs/digit.py"], "did you mean 'configs/digits.py'"),
        ([*DIGITS, "--config.data.name=digit"], "did you mean 'digits'"),
        ([*DIGITS, "--config.total=3 weeks"], "'40 epochs'"),
        ([*DIGITS, "--stop-afer=3"], "did you mean '--stop-after'"),
        ([*CIFAR, "--config.data.data_dir={tmp}/data"], "prepare it with: "),
        ([*CIFAR, "--config.data.name=cifr10"], "did you mean 'cifar10'"),
        ([], "required: --config"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value[1:]),
)
def test_a_mistake_is_one_line_on_standard_error(tmp_path, capfd, arguments, message):
    arguments = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    directory = tmp_path / "run"
    assert run(*arguments, "--directory", directory) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert not directory.exists()


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "experiments.train", *DIGITS, "--config.seeed=1"]
    done = subprocess.run(
        [*command, "--directory", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown config key 'seeed'; did you mean 'seed'?")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Interrupted(15, "stopped by SIGTERM"), 143, "stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (NonFiniteError(7, "loss", float("nan")), 1, "error: training stopped: loss is nan at st"),
        (OSError(28, "No space left on device", "x"), 2, "error: [Errno 28] No space left on dev"),
        (ValueError("two\nlines"), 2, "error: two lines\n"),
    ],
    ids=repr,
)
def test_exit_codes(tmp_path, capfd, error, code, text):
    def main(args):
        raise error

    arguments = [*DIGITS, "--directory", str(tmp_path)]
    assert cli.run(main, train.make_parser(), arguments) == code
    errors = capfd.readouterr().err
    assert errors.startswith(text)
    assert errors.count("\n") == 1


def test_what_a_library_raises_is_a_bug_and_keeps_its_traceback(tmp_path):
    def main(args):
        json.loads("{")

    with pytest.raises(json.JSONDecodeError):
        cli.run(main, train.make_parser(), [*DIGITS, "--directory", str(tmp_path)])


def test_the_traceback_is_shown_on_request(tmp_path, capfd):
    def main(args):
        raise ValueError("no")

    arguments = [*DIGITS, "--directory", str(tmp_path), "--traceback"]
    assert cli.run(main, train.make_parser(), arguments) == 2
    errors = capfd.readouterr().err
    assert "Traceback" in errors
    assert errors.endswith("error: no\n")


def test_help_says_how(capfd):
    with pytest.raises(SystemExit) as done:
        run("--help")
    assert done.value.code == 0
    assert "--config.batch_size=256" in capfd.readouterr().out
