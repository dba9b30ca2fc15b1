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
from cumulant_jax.training.experiment import CompiledStep, Experiment, build
from cumulant_jax.training.mesh import batch_sharding
from cumulant_jax.training.meter import Meter, require_finite, require_finite_parameters
from cumulant_jax.training.metrics_files import MetricsFiles, NoFiles
from cumulant_jax.training.prefetch import DevicePrefetch
from cumulant_jax.training.processes import is_first, wait_for_all
from cumulant_jax.training.profiler import Profiler
from cumulant_jax.training.progress import Reporter, SilentReporter, default_reporter
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
    checkpoints: str | os.PathLike | None = None,
) -> Summary:
    """Trains in a run directory, or goes on from its last checkpoint.

    The directory holds config.json, metrics.csv, metrics.jsonl, TensorBoard events, checkpoints
    and, at the end, summary.json. A run that is complete is not touched: its summary is reported
    and returned.

    Args:
      config: the experiment.
      directory: the run directory; made if it does not exist.
      reporter: shows the progress; by default a bar on a terminal, else plain lines. If it has a
        method `close`, that is called at the end, whatever happened.
      stop_after: the step (or a duration such as "2 epochs", from the start of the training) after
        which to save and return, for training in parts.
      checkpoints: where the checkpoints go, such as "gs://bucket/run"; None for the run directory.
        A run keeps the place it began with.

    Returns:
      The summary, with `completed` False if the run was stopped by `stop_after`.

    Raises:
      ValueError: if the directory holds a run of another config (the message lists the differences)
        or the config names something that does not exist; nothing is written then.
      FileNotFoundError: if the data set is not prepared.
      CheckpointError: if no checkpoint can be read, or one cannot be written. One that is damaged
        is put aside with a warning, and the one before it taken.
      NonFiniteError: if a metric became NaN or infinite; no later state is saved.
      Interrupted: on SIGINT or SIGTERM, after the step was finished and saved.
    """
    run = RunDirectory(directory)
    run.check(config)
    if checkpoints is not None:
        run.check_checkpoints(checkpoints)
    done = run.summary()
    with contextlib.ExitStack() as stack:
        reporter = reporter if is_first() else SilentReporter()
        reporter = reporter or default_reporter()
        stack.callback(getattr(reporter, "close", lambda: None))
        if done is not None and done.completed:
            reporter.on_finish(done)
            return done
        # All that can be wrong with the config shows before anything is written.
        experiment = build(config)
        last = _last_step(experiment, stop_after)
        stack.enter_context(jax.set_mesh(experiment.mesh))
        traced = experiment.trace_train_step()
        if is_first():
            stack.enter_context(run.lock())
            if checkpoints is not None:
                run.write_checkpoints(checkpoints)
            run.write_config(config)
        wait_for_all("the run directory is there")
        stop = StopRequest()
        summary = _run(experiment, run, reporter, last=last, traced=traced, stop=stop, outer=stack)
        if is_first():
            run.write_summary(summary)
        reporter.on_finish(summary)
    if stop.signum is not None:
        raise Interrupted(stop.signum, _stop_message(stop.signum, summary))
    return summary


def _run(
    experiment: Experiment,
    run: RunDirectory,
    reporter: Reporter,
    *,
    last: int,
    traced: Any,
    stop: StopRequest,
    outer: contextlib.ExitStack,
) -> Summary:
    """Trains up to step `last` or a signal; what was trained is on disk when it returns."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(_open_checkpoints(experiment, run))
        iterator = stack.enter_context(contextlib.closing(experiment.train_iterator()))
        state, record = _start_or_restore(experiment, checkpoints, iterator)
        step = int(state.step)
        train_step = experiment.compile_train_step(traced)
        files = stack.enter_context(_open_files(experiment, run, after_step=step))
        profiler = stack.enter_context(
            Profiler(run.path / "profile", experiment.config.profile_steps)
        )
        batches = DevicePrefetch(iterator, batch_sharding(experiment.mesh))
        # Until the caller has written the summary: a signal must not cut the last writes short.
        outer.enter_context(stop)
        reporter.on_start(run_info(experiment, train_step, start=step))
        # Nothing moves between host and devices unasked. Entered once, not around every step:
        # a change of the guard costs the next call 0.1 ms.
        stack.enter_context(jax.transfer_guard("disallow"))
        loop = _Loop(
            experiment=experiment,
            reporter=reporter,
            train_step=train_step,
            checkpoints=checkpoints,
            files=files,
            batches=batches,
            profiler=profiler,
            record=record,
            began=began - record.wall_seconds,
            step=step,
            state=state,
        )
        loop.run(last, stop)
        checkpoints.wait()
    record.wall_seconds = time.perf_counter() - loop.began
    return summarize(experiment, train_step, record, step=loop.step)


@dataclasses.dataclass(kw_only=True)
class _Loop:
    """A run between its first and its last step in this process."""

    experiment: Experiment
    reporter: Reporter
    train_step: CompiledStep
    checkpoints: Checkpoints
    files: MetricsFiles | NoFiles
    batches: DevicePrefetch
    profiler: Profiler
    record: Record
    began: float
    step: int
    state: TrainState

    def __post_init__(self):
        peak = self.experiment.peak_flops()
        self._meter = Meter(
            batch_size=self.experiment.config.batch_size,
            flops=self.experiment.step_flops() if peak else 0.0,
            peak_flops=peak,
        )
        self._eval_step = self.experiment.eval_step()
        self._saved = self._reported = self.step
        # Of the current step; empty if it was not evaluated.
        self._scores: dict[str, float] = {}

    def run(self, last: int, stop: StopRequest) -> None:
        """Trains up to step `last` or a signal, and saves the step it ends with."""
        plan, call = self.experiment.plan, self.train_step.call
        while self.step < last and not stop.stops_after(self.step):
            self.step += 1
            self.profiler.before(self.step)
            with self._meter.waiting_for_input():
                batch = next(self.batches)
            with self._meter.dispatching():
                self.state, values = call(self.state, batch)
            self._meter.add(self.step, values)
            self.profiler.after(self.step, values)
            self._scores = {}
            due = plan.due(self.step)
            if due:
                self._report()
            if due.evaluate:
                self._evaluate()
            if due.checkpoint:
                self._save()
            if due.evaluate or due.checkpoint:
                self._meter.restart_clock()
        # Asked once more after the loop: a signal may come at any moment of it.
        if self._saved != self.step:
            if self._reported != self.step:
                self._report()
            self._save()

    def _report(self) -> None:
        means, seconds = self._meter.flush()
        self.record.training_seconds += seconds
        self._reported = self.step
        self.files.write(self.step, row(self.experiment, self.record, self.step, "train", means))
        self.reporter.on_step_metrics(self.step, means)

    def _evaluate(self) -> None:
        # What was written and shown since the row belongs to the training, not to the evaluation.
        self.record.training_seconds += self._meter.restart_clock()
        scores = self.experiment.evaluate(self._eval_step, self.state)
        require_finite(self.step, scores, prefix="eval/")
        self._scores = self.record.final_metrics = scores
        self.files.write(self.step, row(self.experiment, self.record, self.step, "eval", scores))
        self.reporter.on_evaluation(self.step, scores)

    def _save(self) -> None:
        require_finite_parameters(self.step, self.state.params)
        task = self.experiment.task
        if self._scores:
            self.record.note_saved(
                self.step,
                self._scores,
                metric=task.main_metric,
                larger_is_better=task.larger_is_better,
            )
        self.files.flush()
        self.record.wall_seconds = time.perf_counter() - self.began
        self.checkpoints.save(
            self.step,
            self.state,
            data=self.batches.state,
            config=self.experiment.config.to_dict(),
            progress=dataclasses.asdict(self.record),
            metrics=self._scores,
        )
        self._saved = self.step


def _stop_message(signum: int, summary: Summary) -> str:
    name = signal.Signals(signum).name
    if not summary.steps:
        return f"stopped by {name} before step 1; the same command starts again"
    if summary.completed:
        return f"stopped by {name} at step {summary.steps}, which is saved; the run is complete"
    return (
        f"stopped by {name} at step {summary.steps}, which is saved; "
        "the same command goes on from there"
    )


def _open_checkpoints(experiment: Experiment, run: RunDirectory) -> Checkpoints:
    return Checkpoints(
        run.checkpoints,
        keep_last=experiment.config.keep_last,
        keep_best=experiment.config.keep_best,
        metric=experiment.task.main_metric,
        larger_is_better=experiment.task.larger_is_better,
    )


def _open_files(
    experiment: Experiment, run: RunDirectory, *, after_step: int
) -> MetricsFiles | NoFiles:
    if not is_first():
        return NoFiles()
    return MetricsFiles(run.path, columns(experiment), after_step=after_step)


def _start_or_restore(
    experiment: Experiment, checkpoints: Checkpoints, iterator: Any
) -> tuple[TrainState, Record]:
    restored = checkpoints.restore_latest(experiment.shapes)
    if restored is None:
        return experiment.create_state(), Record()
    iterator.set_state(restored.data)
    return restored.state, Record(**restored.progress)


def _last_step(experiment: Experiment, stop_after: int | str | None) -> int:
    if stop_after is None:
        return experiment.plan.total
    steps = Duration.parse(stop_after, name="stop_after").steps(
        num_examples=experiment.task.num_train, batch_size=experiment.config.batch_size
    )
    return min(steps, experiment.plan.total)
