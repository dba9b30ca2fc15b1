"""Checkpoints: state, data position and config together, written atomically in the background."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from cumulant_jax.training.processes import all_agree, is_first, wait_for_all
from cumulant_jax.training.state import TrainState

_logger = logging.getLogger(__name__)


class CheckpointError(OSError):
    """A checkpoint cannot be read or written; the message says which and what to do.

    Attributes:
      reason: what is wrong with it.
    """

    def __init__(self, message: str, *, reason: str = ""):
        """Keeps the reason beside the message."""
        super().__init__(message)
        self.reason = reason


class Restored(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      state: the training state, on the devices.
      data: the state of the data iterator.
      progress: figures that go on over restarts, such as the seconds trained so far.
    """

    state: TrainState
    data: dict[str, Any]
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, `directory/STEP`; a context manager that waits for writes.

    A checkpoint is written to a temporary directory and renamed when it is whole, so one that a
    kill interrupted is never seen; its remains are removed when a run starts again.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str = "accuracy",
        larger_is_better: bool = True,
        read_only: bool = False,
    ):
        """Opens the directory.

        Args:
          directory: where the checkpoints are, on disk or in a bucket ("gs://bucket/run").
          keep_last: the number of latest checkpoints to keep.
          keep_best: the number of best checkpoints to keep besides.
          metric: what makes a checkpoint the best.
          larger_is_better: whether the best has the largest metric.
          read_only: whether only to restore; then the remains of interrupted writes stay, as
            another process may be writing.

        Raises:
          CheckpointError: if the metrics of a checkpoint cannot be read.
        """
        directory = epath.Path(directory)
        self._directory = directory if "://" in str(directory) else directory.absolute()
        self._metric = metric
        self._sign = 1.0 if larger_is_better else -1.0
        best = policies.BestN(
            get_metric_fn=self._score, n=keep_best, keep_checkpoints_without_metrics=False
        )
        policy = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
        if not read_only and is_first():
            _remove_remains(self._directory)
        wait_for_all("remains of checkpoints are removed")
        # Orbax reads them all when it opens, and says nothing of where they are.
        for step in self._steps_on_disk():
            self._require_metrics(step, put_aside=not read_only)
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                best_fn=self._score,
                preservation_policy=policy,
                create=not read_only,
            ),
        )

    def _score(self, metrics: Mapping[str, float]) -> float:
        # A checkpoint between evaluations (on a signal) has no metrics and is never the best.
        value = metrics.get(self._metric)
        return float("-inf") if value is None else self._sign * value

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for what is being written."""
        try:
            with _write_errors(self._directory):
                self._manager.close()
        except CheckpointError:
            # The error that ends the run is the one to see.
            if error is None:
                raise

    @property
    def latest_step(self) -> int | None:
        """The step of the latest checkpoint."""
        return max(self.steps, default=None)

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the best metric; None if none has metrics."""
        scores = {step: self._metrics(step) for step in self.steps}
        scored = [step for step, metrics in scores.items() if self._metric in metrics]
        return max(scored, key=lambda step: (self._score(scores[step]), step), default=None)

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order; an empty directory is none."""
        return [s for s in sorted(self._manager.all_steps()) if not _is_empty(self._path(s))]

    def _path(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def _steps_on_disk(self) -> list[int]:
        folders = [f for f in self._directory.glob("*") if f.name.isdecimal() and not _is_empty(f)]
        return sorted(int(folder.name) for folder in folders)

    def _metrics(self, step: int) -> dict[str, float]:
        """Reads the metrics of a checkpoint; empty if it has none, or is still being written."""
        file = self._path(step) / "metrics" / "metrics"
        if not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise self._damaged(step, error) from error

    def _require_metrics(self, step: int, *, put_aside: bool) -> None:
        try:
            self._metrics(step)
        except CheckpointError as error:
            if not put_aside or step == self._steps_on_disk()[0]:
                raise
            self._put_aside(step, error)

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        before = [other for other in self._steps_on_disk() if other < step]
        remedy = f"go on from step {before[-1]}" if before else "start from the beginning"
        reason = f"cannot be read ({_first_line(error)})"
        return CheckpointError(
            f"the checkpoint {str(self._path(step))!r} {reason}; delete that directory to "
            f"{remedy}.",
            reason=reason,
        )

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        data: Mapping[str, Any],
        config: Mapping[str, Any],
        progress: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Starts writing a checkpoint, after the one before is done.

        Returns once the state is copied: the next step may take its memory.

        Args:
          step: the number of steps done.
          state: the state after that step.
          data: the data iterator's state after that step, JSON-able.
          config: the experiment's config, JSON-able.
          progress: what `Restored.progress` is to hold, JSON-able.
          metrics: the evaluation after that step; empty if there was none.
        """
        content = ocp.args.Composite(
            state=ocp.args.StandardSave(state),  # type: ignore[call-arg]
            data=ocp.args.JsonSave(dict(data)),  # type: ignore[call-arg]
            config=ocp.args.JsonSave(dict(config)),  # type: ignore[call-arg]
            progress=ocp.args.JsonSave(dict(progress)),  # type: ignore[call-arg]
        )
        with jax.transfer_guard("allow"), _write_errors(self._directory):
            self._manager.save(step, args=content, metrics=dict(metrics), force=True)

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Restores a checkpoint.

        Args:
          step: which one, of `steps`.
          abstract: shapes, types and shardings of the state, from `state_shapes`.

        Raises:
          CheckpointError: if it is damaged, naming it and what to delete.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),  # type: ignore[call-arg]
            data=ocp.args.JsonRestore(),
            progress=ocp.args.JsonRestore(),
        )
        # Whatever a damaged file makes Orbax and TensorStore raise: they document nothing.
        try:
            content: Any = self._manager.restore(step, args=items)
            for name in ("state", "data", "progress"):
                if content.get(name) is None:
                    raise ValueError(f"{name} is missing")
        except Exception as error:
            raise self._damaged(step, error) from error
        return Restored(content.state, content.data, content.progress)

    def restore_latest(self, abstract: TrainState) -> Restored | None:
        """Restores the latest checkpoint that can be read.

        A damaged one is renamed to "damaged-STEP", with a warning, and the one before it taken. The
        steps after that are trained again, and the same data make the same state of them.

        Args:
          abstract: as for `restore`.

        Returns:
          Its content; None if there is no checkpoint at all.

        Raises:
          CheckpointError: if there are some, and none can be read.
        """
        steps = self.steps
        for step in reversed(steps):
            restored, error = self._try(step, abstract)
            # A file may be whole for one process and not for another.
            if all_agree(restored is not None):
                return restored
            error = error or self._damaged(step, ValueError("another process cannot read it"))
            if step == steps[0]:
                raise error
            self._put_aside(step, error)
            self._manager.reload()
        return None

    def _try(
        self, step: int, abstract: TrainState
    ) -> tuple[Restored | None, CheckpointError | None]:
        try:
            return self.restore(step, abstract), None
        except CheckpointError as error:
            return None, error

    def _put_aside(self, step: int, error: CheckpointError) -> None:
        path = self._path(step)
        aside = path.with_name(f"damaged-{step}")
        if is_first():
            _logger.warning(
                "the checkpoint %r %s; it is now %r, and the one before it counts",
                str(path),
                error.reason,
                aside.name,
            )
            if aside.exists():
                aside.rmtree()
            path.rename(aside)
        wait_for_all(f"the checkpoint of step {step} is put aside")

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        with _write_errors(self._directory):
            self._manager.wait_until_finished()


@contextlib.contextmanager
def _write_errors(directory: epath.Path) -> Iterator[None]:
    """Turns what a failed write raises, at once or in the background, into one line."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"a checkpoint could not be written to {str(directory)!r} ({_first_line(error)}); the "
            "checkpoints before it are whole. With space on the disk, the same command goes on."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _is_empty(folder: epath.Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _remove_remains(directory: epath.Path) -> None:
    """Removes what interrupted writes left behind.

    Orbax can do it too, but in a thread that nothing waits for: at the end of a short run it dies
    with an error message.
    """
    for remains in directory.glob("*.orbax-checkpoint-tmp*"):
        remains.rmtree()
    for folder in directory.glob("*"):
        if folder.name.isdecimal() and _is_empty(folder):
            folder.rmdir()
