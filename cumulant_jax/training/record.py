"""What a run records: the figures that go on over restarts, the rows of metrics, the summary."""

import dataclasses
from collections.abc import Mapping

from cumulant_jax.training.experiment import CompiledStep, Experiment
from cumulant_jax.training.summary import RunInfo, Summary


@dataclasses.dataclass
class Record:
    """The figures of a run that every checkpoint holds beside the state.

    Attributes:
      training_seconds: time spent on steps and their logging, not on evaluations and checkpoints.
      wall_seconds: time from start to end, summed over restarts.
      final_metrics: the latest evaluation.
      best_metrics: the best evaluation by the task's main metric, among those whose step was
        saved: it is the evaluation of the best checkpoint.
      best_step: its step.
    """

    training_seconds: float = 0.0
    wall_seconds: float = 0.0
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None

    def note_saved(
        self, step: int, scores: dict[str, float], *, metric: str, larger_is_better: bool
    ) -> None:
        """Takes the evaluation of a checkpoint; of equally good ones the latest is the best.

        >>> record = Record()
        >>> for step, loss in enumerate([0.5, 0.2, 0.4]):
        ...     record.note_saved(step, {"loss": loss}, metric="loss", larger_is_better=False)
        >>> record.best_step, record.best_metrics
        (1, {'loss': 0.2})
        """
        sign = 1 if larger_is_better else -1
        if not self.best_metrics or sign * scores[metric] >= sign * self.best_metrics[metric]:
            self.best_metrics, self.best_step = scores, step


def columns(experiment: Experiment) -> list[str]:
    """Returns the columns of metrics.csv besides `step`."""
    names = experiment.task.metric_names
    times = ["step_ms", "input_wait_ms", "dispatch_ms", "device_wait_ms"]
    times += ["mfu"] if experiment.peak_flops() else []
    train = [*names, "grad_norm", "learning_rate", "examples_per_second", *times]
    figures = ["epoch", "training_seconds"]
    return figures + [f"train/{name}" for name in train] + [f"eval/{name}" for name in names]


def row(
    experiment: Experiment, record: Record, step: int, part: str, values: Mapping[str, float]
) -> dict[str, float]:
    """Returns the row of a step; `part` is "train" or "eval"."""
    epoch = step * experiment.config.batch_size / experiment.task.num_train
    figures = {"epoch": epoch, "training_seconds": record.training_seconds}
    return {**figures, **{f"{part}/{name}": value for name, value in values.items()}}


def run_info(experiment: Experiment, train_step: CompiledStep, *, start: int) -> RunInfo:
    """Returns what a reporter learns at the start."""
    return RunInfo(
        label=experiment.task.label,
        unit=experiment.task.unit,
        start_step=start,
        total_steps=experiment.plan.total,
        num_train=experiment.task.num_train,
        batch_size=experiment.config.batch_size,
        num_parameters=experiment.num_parameters,
        num_devices=experiment.mesh.size,
        compile_seconds=train_step.seconds,
    )


def summarize(
    experiment: Experiment, train_step: CompiledStep, record: Record, *, step: int
) -> Summary:
    """Returns the summary of a run that ends after `step`."""
    seconds = record.training_seconds
    return Summary(
        steps=step,
        completed=step >= experiment.plan.total,
        final_metrics=record.final_metrics,
        best_metrics=record.best_metrics,
        best_step=record.best_step,
        num_parameters=experiment.num_parameters,
        images_per_second=step * experiment.config.batch_size / seconds if seconds else 0.0,
        step_time_ms=1e3 * seconds / step if step else 0.0,
        step_memory_bytes=train_step.memory_bytes,
        compile_seconds=train_step.seconds,
        wall_seconds=record.wall_seconds,
    )
