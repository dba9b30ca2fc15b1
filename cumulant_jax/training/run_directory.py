"""The run directory: what belongs to a run, and the rule that it holds one config."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cumulant_jax.training.config import ExperimentConfig, difference
from cumulant_jax.training.summary import Summary

try:
    import fcntl
except ImportError:  # Windows: runs work, but nothing keeps two apart.
    fcntl = None


class RunDirectory:
    """The files of a run.

    config.json, metrics.csv, metrics.jsonl, tensorboard/, checkpoints/, summary.json (at the end)
    and run.lock (held by the process that trains).
    """

    def __init__(self, path: str | os.PathLike):
        """Names a directory; nothing is made yet."""
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def config(self) -> ExperimentConfig:
        """Reads the config of the run.

        Raises:
          FileNotFoundError: if the directory holds no run.
        """
        file = self.path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"--directory: there is no run in {str(self.path)!r}.")
        return ExperimentConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))

    def check(self, config: ExperimentConfig) -> None:
        """Makes sure that the directory is new or holds a run of this config; changes nothing.

        Raises:
          ValueError: if it holds a run of another config, listing the differences.
          NotADirectoryError: if the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"directory: {str(self.path)!r} is a file.")
        if not (self.path / "config.json").is_file():
            return
        changes = difference(self.config(), config)
        if changes:
            raise ValueError(
                f"directory: {str(self.path)!r} holds a run with another config: "
                f"{'; '.join(changes)}. Use that config, or another directory."
            )

    def summary(self) -> Summary | None:
        """Reads the summary of the run; None if it has not ended yet."""
        file = self.path / "summary.json"
        if not file.is_file():
            return None
        return Summary.from_dict(json.loads(file.read_text(encoding="utf-8")))

    def write_config(self, config: ExperimentConfig) -> None:
        """Writes config.json unless it is there."""
        if not (self.path / "config.json").is_file():
            write_json(self.path / "config.json", config.to_dict())

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json."""
        write_json(self.path / "summary.json", summary.to_dict())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from training in this directory.

        Raises:
          ValueError: if another process trains here. A process that died holds no lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "run.lock").open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(
                        f"directory: another process is training in {str(self.path)!r}."
                    ) from None
            yield


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file so that a reader, or a kill, never sees half of it."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, file)
