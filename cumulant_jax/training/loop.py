"""The training loop. It knows nothing of images: the task supplies data, model and loss."""

import dataclasses
import os
import signal
import time
from typing import Any

import jax

from cumulant_jax.training.checkpoint import Checkpoints
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.durations import Duration
from cumulant_jax.training.experiment import CompiledStep, Experiment, build
from cumulant_jax.training.mesh import batch_sharding
from cumulant_jax.training.meter import Meter
from cumulant_jax.training.metrics_files import MetricsFiles
from cumulant_jax.training.prefetch import DevicePrefetch
from cumulant_jax.training.progress import Reporter, default_reporter
from cumulant_jax.training.run_directory import RunDirectory
from cumulant_jax.training.signals import Interrupted, StopRequest
from cumulant_jax.training.state import TrainState
from cumulant_jax.training.summary import RunInfo, Summary


@dataclasses.dataclass
class _Progress:
    """What goes on over restarts besides the state; saved with every checkpoint."""

    training_seconds: float = 0.0
    wall_seconds: float = 0.0
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None


def train(
    config: ExperimentConfig,
    directory: str | os.PathLike,
    *,
    reporter: Reporter | None = None,
    stop_after: int | str | None = None,
) -> Summary:
    """Trains in a run directory, or goes on from its last checkpoint.

    The directory holds config.json, metrics.csv, metrics.jsonl, TensorBoard events, checkpoints
    and, at the end, summary.json. A run that is complete is not touched: its summary is returned.

    Args:
      config: the experiment.
      directory: the run directory; made if it does not exist.
      reporter: shows the progress; by default a bar on a terminal, else plain lines.
      stop_after: the step (or a duration such as "2 epochs", from the start of the training) after
        which to save and return, for training in parts.

    Returns:
      The summary, with `completed` False if the run was stopped by `stop_after`.

    Raises:
      ValueError: if the directory holds a run of another config (the message lists the differences)
        or the config names something that does not exist; nothing is written then.
      FileNotFoundError: if the data set is not prepared.
      NonFiniteError: if a metric became NaN or infinite; no later state is saved.
      Interrupted: on SIGINT or SIGTERM, after the step was finished and saved.
    """
    run = RunDirectory(directory)
    run.check(config)
    done = run.summary()
    if done is not None and done.completed:
        return done
    experiment = build(config)
    reporter = reporter or default_reporter()
    with (
        run.lock(),
        jax.set_mesh(experiment.mesh),
        _checkpoints(experiment, run) as checkpoints,
    ):
        run.write_config(config)
        summary, signum = _run(experiment, run, checkpoints, reporter, stop_after)
        checkpoints.wait()
        run.write_summary(summary)
    reporter.on_finish(summary)
    if signum is not None and not summary.completed:
        raise Interrupted(
            signum,
            f"stopped by {signal.Signals(signum).name} at step {summary.steps}, which is saved; "
            "the same command goes on from there",
        )
    return summary


def _run(
    experiment: Experiment,
    run: RunDirectory,
    checkpoints: Checkpoints,
    reporter: Reporter,
    stop_after: int | str | None,
) -> tuple[Summary, int | None]:
    config, plan = experiment.config, experiment.plan
    began = time.perf_counter()
    iterator = experiment.train_iterator()
    state, progress = _start_or_restore(experiment, checkpoints, iterator)
    earlier_seconds = progress.wall_seconds
    start, last = int(state.step), _last_step(experiment, stop_after)
    train_step, eval_step = experiment.compile_train_step(), experiment.eval_step()
    reporter.on_start(_run_info(experiment, train_step, start))

    batches = DevicePrefetch(iterator, batch_sharding(experiment.mesh))
    files = MetricsFiles(run.path, _columns(experiment), after_step=start)
    meter = Meter(batch_size=config.batch_size)
    step = start
    with files, StopRequest() as stop:
        while step < last and stop.signum is None:
            step += 1
            batch = next(batches)
            with jax.transfer_guard("disallow"):
                state, values = train_step.call(state, batch)
            meter.add(step, values)

            due = plan.due(step)
            stopping = step == last or stop.signum is not None
            if not (due or stopping):
                continue
            means, seconds = meter.flush()
            progress.training_seconds += seconds
            files.write(step, _row(experiment, step, progress, "train", means))
            reporter.on_step_metrics(step, means)

            scores = {}
            if due.evaluate:
                scores = experiment.evaluate(eval_step, state)
                _note_evaluation(experiment, progress, step, scores)
                files.write(step, _row(experiment, step, progress, "eval", scores))
                reporter.on_evaluation(step, scores)
            if due.checkpoint or stopping:
                files.flush()
                progress.wall_seconds = earlier_seconds + time.perf_counter() - began
                checkpoints.save(
                    step,
                    state,
                    data=batches.state,
                    config=config.to_dict(),
                    progress=dataclasses.asdict(progress),
                    metrics=scores,
                )
            meter.restart_clock()
    batches.close()
    checkpoints.wait()
    progress.wall_seconds = earlier_seconds + time.perf_counter() - began
    return _summary(experiment, train_step, progress, step), stop.signum


def _checkpoints(experiment: Experiment, run: RunDirectory) -> Checkpoints:
    return Checkpoints(
        run.checkpoints,
        keep_last=experiment.config.keep_last,
        keep_best=experiment.config.keep_best,
        metric=experiment.task.main_metric,
        larger_is_better=experiment.task.larger_is_better,
    )


def _start_or_restore(
    experiment: Experiment, checkpoints: Checkpoints, iterator: Any
) -> tuple[TrainState, _Progress]:
    step = checkpoints.latest_step
    if step is None:
        return experiment.create_state(), _Progress()
    restored = checkpoints.restore(step, experiment.shapes)
    iterator.set_state(restored.data)
    return restored.state, _Progress(**restored.progress)


def _last_step(experiment: Experiment, stop_after: int | str | None) -> int:
    if stop_after is None:
        return experiment.plan.total
    steps = Duration.parse(stop_after, name="stop_after").steps(
        num_examples=experiment.task.num_train, batch_size=experiment.config.batch_size
    )
    return min(steps, experiment.plan.total)


def _run_info(experiment: Experiment, train_step: CompiledStep, start: int) -> RunInfo:
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


def _columns(experiment: Experiment) -> list[str]:
    names = experiment.task.metric_names
    train = [*names, "grad_norm", "learning_rate", "examples_per_second"]
    figures = ["epoch", "training_seconds"]
    return figures + [f"train/{name}" for name in train] + [f"eval/{name}" for name in names]


def _row(
    experiment: Experiment, step: int, progress: _Progress, part: str, values: dict[str, float]
) -> dict[str, float]:
    epoch = step * experiment.config.batch_size / experiment.task.num_train
    figures = {"epoch": epoch, "training_seconds": progress.training_seconds}
    return {**figures, **{f"{part}/{name}": value for name, value in values.items()}}


def _note_evaluation(
    experiment: Experiment, progress: _Progress, step: int, scores: dict[str, float]
) -> None:
    name, sign = experiment.task.main_metric, 1 if experiment.task.larger_is_better else -1
    progress.final_metrics = scores
    # Of equals the latest, as the checkpoints are kept.
    if not progress.best_metrics or sign * scores[name] >= sign * progress.best_metrics[name]:
        progress.best_metrics, progress.best_step = scores, step


def _summary(
    experiment: Experiment, train_step: CompiledStep, progress: _Progress, step: int
) -> Summary:
    seconds = progress.training_seconds
    return Summary(
        steps=step,
        completed=step >= experiment.plan.total,
        final_metrics=progress.final_metrics,
        best_metrics=progress.best_metrics,
        best_step=progress.best_step,
        num_parameters=experiment.num_parameters,
        images_per_second=step * experiment.config.batch_size / seconds if seconds else 0.0,
        step_time_ms=1e3 * seconds / step if step else 0.0,
        step_memory_bytes=train_step.memory_bytes,
        compile_seconds=train_step.seconds,
        wall_seconds=progress.wall_seconds,
    )
