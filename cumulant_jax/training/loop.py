"""The training loop. It knows nothing of images: the task supplies data, model and loss."""

import contextlib
import dataclasses
import os
import signal
import time
from typing import Any

import jax

from cumulant_jax.training.checkpoint import Checkpoints
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.durations import Duration
from cumulant_jax.training.experiment import Experiment, build
from cumulant_jax.training.mesh import batch_sharding
from cumulant_jax.training.meter import Meter
from cumulant_jax.training.metrics_files import MetricsFiles
from cumulant_jax.training.prefetch import DevicePrefetch
from cumulant_jax.training.progress import Reporter, default_reporter
from cumulant_jax.training.record import Record, columns, row, run_info, summarize
from cumulant_jax.training.run_directory import RunDirectory
from cumulant_jax.training.signals import Interrupted, StopRequest
from cumulant_jax.training.state import TrainState
from cumulant_jax.training.summary import Summary


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
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.lock())
        stack.enter_context(jax.set_mesh(experiment.mesh))
        if reporter is None:
            reporter = stack.enter_context(contextlib.closing(default_reporter()))
        run.write_config(config)
        summary, signum = _run(experiment, run, reporter, stop_after)
        run.write_summary(summary)
        reporter.on_finish(summary)
    if signum is not None:
        raise Interrupted(
            signum,
            f"stopped by {signal.Signals(signum).name} at step {summary.steps}, which is saved; "
            "the same command goes on from there",
        )
    return summary


def _run(
    experiment: Experiment, run: RunDirectory, reporter: Reporter, stop_after: int | str | None
) -> tuple[Summary, int | None]:
    """Trains; returns the summary and the signal that stopped the run, if one did."""
    config, task, plan = experiment.config, experiment.task, experiment.plan
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(_open_checkpoints(experiment, run))
        iterator = stack.enter_context(contextlib.closing(experiment.train_iterator()))
        state, record = _start_or_restore(experiment, checkpoints, iterator)
        earlier_seconds = record.wall_seconds
        step, last = int(state.step), _last_step(experiment, stop_after)
        train_step, eval_step = experiment.compile_train_step(), experiment.eval_step()
        reporter.on_start(run_info(experiment, train_step, start=step))

        files = stack.enter_context(MetricsFiles(run.path, columns(experiment), after_step=step))
        batches = DevicePrefetch(iterator, batch_sharding(experiment.mesh))
        stop = stack.enter_context(StopRequest())
        # Nothing moves between host and devices unasked. Entered once, not around every step:
        # a change of the guard costs the next call 0.1 ms.
        stack.enter_context(jax.transfer_guard("disallow"))
        meter = Meter(batch_size=config.batch_size)
        stopping = step >= last
        while not stopping:
            step += 1
            state, values = train_step.call(state, next(batches))
            meter.add(step, values)

            due = plan.due(step)
            stopping = step == last or stop.signum is not None
            if not (due or stopping):
                continue
            means, seconds = meter.flush()
            record.training_seconds += seconds
            files.write(step, row(experiment, record, step, "train", means))
            reporter.on_step_metrics(step, means)

            scores = {}
            if due.evaluate:
                scores = experiment.evaluate(eval_step, state)
                record.note_evaluation(
                    step,
                    scores,
                    metric=task.main_metric,
                    larger_is_better=task.larger_is_better,
                )
                files.write(step, row(experiment, record, step, "eval", scores))
                reporter.on_evaluation(step, scores)
                stopping = stopping or stop.signum is not None
            if due.checkpoint or stopping:
                files.flush()
                record.wall_seconds = earlier_seconds + time.perf_counter() - began
                checkpoints.save(
                    step,
                    state,
                    data=batches.state,
                    config=config.to_dict(),
                    progress=dataclasses.asdict(record),
                    metrics=scores,
                )
            meter.restart_clock()
        checkpoints.wait()
        signum = stop.signum
    record.wall_seconds = earlier_seconds + time.perf_counter() - began
    return summarize(experiment, train_step, record, step=step), signum


def _open_checkpoints(experiment: Experiment, run: RunDirectory) -> Checkpoints:
    return Checkpoints(
        run.checkpoints,
        keep_last=experiment.config.keep_last,
        keep_best=experiment.config.keep_best,
        metric=experiment.task.main_metric,
        larger_is_better=experiment.task.larger_is_better,
    )


def _start_or_restore(
    experiment: Experiment, checkpoints: Checkpoints, iterator: Any
) -> tuple[TrainState, Record]:
    step = checkpoints.latest_step
    if step is None:
        return experiment.create_state(), Record()
    restored = checkpoints.restore(step, experiment.shapes)
    iterator.set_state(restored.data)
    return restored.state, Record(**restored.progress)


def _last_step(experiment: Experiment, stop_after: int | str | None) -> int:
    if stop_after is None:
        return experiment.plan.total
    steps = Duration.parse(stop_after, name="stop_after").steps(
        num_examples=experiment.task.num_train, batch_size=experiment.config.batch_size
    )
    return min(steps, experiment.plan.total)
