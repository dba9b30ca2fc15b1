"""A model small enough to compile in a second, and what the training tests share."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from cumulant_jax.training import ExperimentConfig
from cumulant_jax.training.config import OptimizerConfig

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs are compiled once per test process, and the user's own cache is left alone."""
    directory = tmp_path_factory.mktemp("xla")
    before = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
        )
    }
    # For the processes that tests start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield directory
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
    del os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def tiny():
    """Makes configs of a ViT of 4 tokens and width 16 on the digits; keywords change keys."""

    def make(*, options=None, **changes) -> ExperimentConfig:
        base = ExperimentConfig(
            batch_size=32,
            total="12 steps",
            evaluate_every="6 steps",
            checkpoint_every="6 steps",
            log_every="3 steps",
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup="2 steps"),
        )
        small = {"dim": 16, "depth": 1, "heads": 2, "pool": "mean"} | (options or {})
        return base.replace(model__name="vit_nano4", model__options=small, **changes)

    return make


@pytest.fixture
def same():
    """Asserts that two trees hold the same bits, and names the leaves that do not."""

    def check(actual, expected):
        actual, expected = (
            {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
            for leaves in (
                jax.tree_util.tree_flatten_with_path(actual)[0],
                jax.tree_util.tree_flatten_with_path(expected)[0],
            )
        )
        assert actual.keys() == expected.keys()
        different = [
            path
            for path, value in actual.items()
            if value.dtype != expected[path].dtype or value.tobytes() != expected[path].tobytes()
        ]
        assert not different, f"leaves that differ: {different}"

    return check


class Process:
    """A training process that a test watches and signals."""

    def __init__(self, *arguments: str, cwd: Path):
        self._popen = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, condition, *, seconds: float = 120.0):
        """Waits until `condition()` is true while the process runs."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self._popen.poll() is None, f"ended early: {self._popen.communicate()}"
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.01)
        return value

    def end(self, signum: int | None = None) -> tuple[int, str, str]:
        """Sends a signal and returns the exit code, standard output and standard error."""
        if signum is not None:
            self._popen.send_signal(signum)
        output, errors = self._popen.communicate(timeout=120)
        return self._popen.returncode, output, errors

    def signal(self, signum: int):
        """Sends a signal."""
        self._popen.send_signal(signum)


@pytest.fixture
def start(tmp_path):
    """Starts Python processes in `tmp_path`; what still runs at the end of the test is killed."""
    processes = []

    def start(*arguments: str) -> Process:
        processes.append(Process(*map(str, arguments), cwd=tmp_path))
        return processes[-1]

    yield start
    for process in processes:
        if process._popen.poll() is None:
            process._popen.kill()
            process._popen.communicate()


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file whose get_config() returns an ExperimentConfig's values."""

    def write(config: ExperimentConfig) -> Path:
        file = tmp_path / "tiny_config.py"
        file.write_text(
            "import json\n"
            "from ml_collections import ConfigDict\n"
            "def get_config():\n"
            f"    return ConfigDict(json.loads({json.dumps(config.to_dict())!r}))\n"
        )
        return file

    return write
