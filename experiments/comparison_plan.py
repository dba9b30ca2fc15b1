"""The runs of a comparison: which there are, and what is already on disk of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cumulant_jax.analysis import Curve, RunResult
from cumulant_jax.models import attention_kinds
from cumulant_jax.naming import unknown_name
from cumulant_jax.training import ExperimentConfig, build
from cumulant_jax.training.metrics_files import read_rows
from cumulant_jax.training.run_directory import RunDirectory, write_json
from cumulant_jax.training.summary import Summary

# The files that a comparison writes beside its runs.
REPORTS = ("results.csv", "results.md", "curves.png", "report.html")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: an attention kind and a seed, with the config of both.

    Attributes:
      kind: the attention kind.
      seed: the seed.
      config: the shared config with kind and seed set.
      run: where the run lives.
    """

    kind: str
    seed: int
    config: ExperimentConfig
    run: RunDirectory

    def result(self) -> RunResult | None:
        """Reads the result of the run; None while it is not finished."""
        summary = self.run.summary()
        if summary is None or not summary.completed:
            return None
        return to_result(self.kind, self.seed, summary)

    def curve(self) -> Curve:
        """Reads the evaluations that the run has written so far."""
        rows = [r for r in read_rows(self.run.path / "metrics.jsonl") if "eval/accuracy" in r]
        steps = tuple(int(row["step"]) for row in rows)
        return Curve(self.kind, self.seed, steps, tuple(row["eval/accuracy"] for row in rows))


def to_result(kind: str, seed: int, summary: Summary) -> RunResult:
    """Turns the summary of a finished run into a row of the results."""
    return RunResult(
        kind=kind,
        seed=seed,
        accuracy=summary.final_metrics["accuracy"],
        best_accuracy=summary.best_metrics["accuracy"],
        parameters=summary.num_parameters,
        # 0 stands for a run that was resumed after its last step: nothing was timed.
        images_per_second=summary.images_per_second or None,
        step_time_ms=summary.step_time_ms or None,
        step_memory_bytes=summary.step_memory_bytes,
        steps=summary.steps,
        wall_seconds=summary.wall_seconds,
    )


def plan(
    config: ExperimentConfig, kinds: Iterable[str], seeds: Sequence[int], directory: Path
) -> list[Cell]:
    """Lists the runs, kind by kind, and makes sure that all of them can be done.

    Args:
      config: what all runs share; its attention kind and seed do not matter.
      kinds: the attention kinds.
      seeds: the seeds. A seed gives every kind the same images in the same order.
      directory: the comparison's directory; a run's is KIND/seed-N in it.

    Raises:
      ValueError: a run on disk has another config; the differences are listed.
    """
    cells = [
        Cell(
            kind,
            seed,
            config.replace(model__attention=kind, seed=seed),
            RunDirectory(directory / kind / f"seed-{seed}"),
        )
        for kind in kinds
        for seed in seeds
    ]
    for cell in cells:
        cell.run.check(cell.config)
    return cells


def build_each(cells: Iterable[Cell]) -> None:
    """Builds the experiment of every kind that is still to be trained; nothing is computed.

    Raises:
      ValueError: a kind cannot be trained with this config; the message names the run.
      FileNotFoundError: the data set is not prepared.
    """
    unfinished = {cell.kind: cell for cell in cells if cell.result() is None}
    for kind, cell in unfinished.items():
        try:
            build(cell.config)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--kinds: {kind} cannot be trained: {error}") from error


def claim(directory: Path, kinds: Sequence[str], seeds: Sequence[int]) -> None:
    """Marks a directory as a comparison's by comparison.json.

    Raises:
      ValueError: it holds files that the reports would overwrite, but no comparison.
      NotADirectoryError: the path is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--directory: {str(directory)!r} is a file.")
    marker = directory / "comparison.json"
    found = [name for name in REPORTS if (directory / name).exists()]
    if found and not marker.is_file() and not any(directory.glob("*/seed-*/config.json")):
        raise ValueError(
            f"--directory: {str(directory)!r} holds {', '.join(found)}, but no comparison. "
            "Move them away, or use another directory."
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(marker, {"kinds": list(kinds), "seeds": list(seeds)})


def parse_kinds(text: str) -> list[str]:
    """Reads "softmax,cumulant3,linear+tssa": kinds, or kinds by layer joined by "+".

    Raises:
      ValueError: there is no such kind (the nearest is named), none at all, or one twice.

    >>> parse_kinds("softmax, cumulant3")
    ['softmax', 'cumulant3']
    """
    kinds = _split("--kinds", text)
    known = attention_kinds()
    for kind in kinds:
        for name in kind.split("+"):
            if name not in known:
                raise ValueError(f"--kinds: {unknown_name('attention kind', name, known)}")
    return kinds


def parse_seeds(text: str) -> list[int]:
    """Reads "0,1,2".

    Raises:
      ValueError: one is no whole number from 0, there is none at all, or one twice.

    >>> parse_seeds("0,1")
    [0, 1]
    """
    seeds = _split("--seeds", text)
    for seed in seeds:
        # 20 digits are too many already; int() refuses thousands of them in its own words.
        if not seed.isdecimal() or len(seed) > 20:
            raise ValueError(f"--seeds: got {seed!r}, expected whole numbers such as 0,1,2.")
        if int(seed) >= 2**32:
            raise ValueError(f"--seeds: got {seed}, expected numbers below 2**32.")
    numbers = [int(seed) for seed in seeds]
    _refuse_twice("--seeds", numbers)
    return numbers


def _split(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{flag}: got {text!r}, expected at least one, joined by commas.")
    _refuse_twice(flag, parts)
    return parts


def _refuse_twice(flag: str, parts: Sequence[object]) -> None:
    twice = [part for part in dict.fromkeys(parts) if parts.count(part) > 1]
    if twice:
        raise ValueError(f"{flag}: {twice[0]} is there twice.")
