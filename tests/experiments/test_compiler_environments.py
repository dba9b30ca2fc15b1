"""What would be installed where; pip itself is not run."""

import sys
from pathlib import Path

import pytest

from experiments import compiler_environments
from experiments.compiler_environments import create, plan


@pytest.fixture
def commands(monkeypatch):
    """Records the commands that would run; a made environment has an interpreter."""
    recorded = []

    def run(command, **options):
        del options
        recorded.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        return type("Result", (), {"returncode": 0})()

    monkeypatch.setattr(compiler_environments.subprocess, "run", run)
    return recorded


def test_an_environment_is_made_once(tmp_path, commands):
    said = []
    options = {"root": tmp_path, "given": {}, "jax_version": "0.12.0"}
    [environment] = plan(["tpu", "tpu"], **options)
    assert not environment.is_ready
    assert "jax[tpu]==0.12.0" in environment.announcement
    assert "GB" in environment.announcement
    create(environment, said.append)
    assert commands[0][:3] == [sys.executable, "-m", "venv"]
    assert commands[1][0] == str(environment.python)
    assert commands[1][-len(environment.requirements) :] == list(environment.requirements)
    assert len(said) == 1

    commands.clear()
    [again] = plan(["tpu"], **options)
    assert again.is_ready
    assert again.announcement.startswith("using")
    create(again, said.append)
    assert not commands
    [other] = plan(["tpu"], **options | {"jax_version": "0.11.2"})
    assert not other.is_ready


def test_each_compiler_has_its_own(tmp_path):
    gpu, tpu = plan(["gpu", "tpu"], root=tmp_path, given={}, jax_version="0.12.0")
    assert gpu.path != tpu.path
    assert gpu.requirements[0] == "jax[cuda13]==0.12.0"


def test_a_given_environment_is_used_as_it_is(tmp_path, commands):
    given = tmp_path / "mine"
    (given / "bin").mkdir(parents=True)
    (given / "bin" / "python").touch()
    options = {"root": tmp_path, "given": {"gpu": given}, "jax_version": "0.12.0"}
    [environment] = plan(["gpu"], **options)
    create(environment, lambda text: None)
    assert environment.path == given
    assert not commands
    (given / "bin" / "python").unlink()
    with pytest.raises(FileNotFoundError, match="--environment-cuda must be a virtual environment"):
        plan(["gpu"], **options)


def test_a_failed_install_says_what_to_do(tmp_path, monkeypatch):
    failed = type("Result", (), {"returncode": 1})()
    monkeypatch.setattr(compiler_environments.subprocess, "run", lambda *_, **__: failed)
    [environment] = plan(["tpu"], root=tmp_path, given={}, jax_version="9.9")
    with pytest.raises(OSError, match="name another one with --jax"):
        create(environment, lambda text: None)
    assert not plan(["tpu"], root=tmp_path, given={}, jax_version="9.9")[0].is_ready
