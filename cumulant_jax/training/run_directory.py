"""The run directory: what belongs to a run, and the rule that it holds one config."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from cumulant_jax.training.config import ExperimentConfig, difference
from cumulant_jax.training.summary import Summary

try:
    import fcntl
except ImportError:  # Windows: runs work, but nothing keeps two apart.
    fcntl = None


# What a run writes besides its config, and must not overwrite of another's.
_OUTPUTS = ("checkpoints", "metrics.csv", "metrics.jsonl", "summary.json", "tensorboard")


class RunDirectory:
    """The files of a run.

    config.json, metrics.csv, metrics.jsonl, tensorboard/, checkpoints/, summary.json (at the end)
    and run.lock (held by the process that trains).
    """

    def __init__(self, path: str | os.PathLike):
        """Names a directory; nothing is made yet."""
        self.path = Path(path)

    @property
    def checkpoints(self) -> epath.Path:
        """Where the checkpoints are: here, unless checkpoints.txt names another place."""
        elsewhere = self.path / "checkpoints.txt"
        if elsewhere.is_file():
            return epath.Path(elsewhere.read_text(encoding="utf-8").strip())
        return epath.Path(self.path / "checkpoints")

    def check_checkpoints(self, place: str | os.PathLike) -> None:
        """Makes sure that the checkpoints of this run are, or can be, in another place.

        Raises:
          ValueError: the run has its checkpoints somewhere else already, or those of another run
            are there.
        """
        is_new = not (self.path / "config.json").is_file()
        if not is_new and self.checkpoints != epath.Path(place):
            raise ValueError(
                f"checkpoints: got {os.fspath(place)!r}, but those of the run in "
                f"{str(self.path)!r} are in {str(self.checkpoints)!r}. Leave it out to go on there."
            )
        folder = epath.Path(place)
        if is_new and folder.is_dir() and any(f.name.isdecimal() for f in folder.iterdir()):
            raise ValueError(
                f"checkpoints: {os.fspath(place)!r} holds checkpoints of another run. Use another "
                "place."
            )

    def write_checkpoints(self, place: str | os.PathLike) -> None:
        """Notes that the checkpoints are in another place, such as a bucket."""
        (self.path / "checkpoints.txt").write_text(f"{os.fspath(place)}\n", encoding="utf-8")

    def config(self) -> ExperimentConfig:
        """Reads the config of the run.

        Raises:
          FileNotFoundError: if the directory holds no run.
        """
        file = self.path / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"--directory: there is no run in {str(self.path)!r}.")
        remedy = "Restore it, or use another directory."
        return _read(file, ExperimentConfig.from_dict, remedy=remedy)

    def check(self, config: ExperimentConfig) -> None:
        """Makes sure that the directory is new or holds a run of this config; changes nothing.

        Raises:
          ValueError: if it holds a run of another config, listing the differences, or files
            that a run would overwrite, but no config.json that says what they belong to.
          NotADirectoryError: if the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"directory: {str(self.path)!r} is a file.")
        if not (self.path / "config.json").is_file():
            found = [name for name in _OUTPUTS if (self.path / name).exists()]
            if found:
                raise ValueError(
                    f"directory: {str(self.path)!r} holds {', '.join(found)} but no config.json "
                    "that says what they belong to. Restore it, or use another directory."
                )
            return
        own = self.config()
        changes = difference(own, config.replace(profile_steps=own.profile_steps))
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
        remedy = "Delete it and train again: that goes on from the last checkpoint."
        return _read(file, Summary.from_dict, remedy=remedy)

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
    text = json.dumps(content, indent=2, allow_nan=False)
    temporary.write_text(f"{text}\n", encoding="utf-8")
    os.replace(temporary, file)


def _read[T](file: Path, build: Callable[[Any], T], *, remedy: str) -> T:
    """Builds an object from a JSON file; what is wrong with the file is one line that names it."""
    try:
        return build(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be used: {error} {remedy}") from error
