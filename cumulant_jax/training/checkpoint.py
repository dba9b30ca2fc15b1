"""Checkpoints: state, data position and config together, written atomically in the background."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from cumulant_jax.training.state import TrainState


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
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str = "accuracy",
        larger_is_better: bool = True,
        read_only: bool = False,
    ):
        """Opens the directory.

        Args:
          directory: where the checkpoints are.
          keep_last: the number of latest checkpoints to keep.
          keep_best: the number of best checkpoints to keep besides.
          metric: what makes a checkpoint the best.
          larger_is_better: whether the best has the largest metric.
          read_only: whether only to restore; then the remains of interrupted writes stay, as
            another process may be writing.
        """
        self._metric = metric
        self._sign = 1.0 if larger_is_better else -1.0
        best = policies.BestN(
            get_metric_fn=self._score, n=keep_best, keep_checkpoints_without_metrics=False
        )
        policy = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
        if not read_only and jax.process_index() == 0:
            _remove_remains(directory)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
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
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the latest checkpoint."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the best metric; None if none has metrics."""
        step = self._manager.best_step()
        return step if step is not None and self._manager.metrics(step) else None

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints."""
        return list(self._manager.all_steps())

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
        with jax.transfer_guard("allow"):
            self._manager.save(step, args=content, metrics=dict(metrics), force=True)

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Restores a checkpoint.

        Args:
          step: which one, of `steps`.
          abstract: shapes, types and shardings of the state, from `state_shapes`.
        """
        content: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),  # type: ignore[call-arg]
                data=ocp.args.JsonRestore(),
                progress=ocp.args.JsonRestore(),
            ),
        )
        return Restored(content.state, content.data, content.progress)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        self._manager.wait_until_finished()


def _remove_remains(directory: Path) -> None:
    """Removes what interrupted writes left behind.

    Orbax can do it too, but in a thread that nothing waits for: at the end of a short run it dies
    with an error message.
    """
    for remains in directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(remains)
