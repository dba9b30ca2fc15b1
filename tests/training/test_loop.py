import io
import json
import os
import signal
import time

import jax
import numpy as np
import pytest
from etils import epath
from rich.console import Console

from cumulant_jax.training import (
    Checkpoints,
    Interrupted,
    MixingConfig,
    NonFiniteError,
    ProgressBar,
    RunDirectory,
    SilentReporter,
    build,
    read_rows,
    train,
)
from cumulant_jax.training.experiment import Experiment
from cumulant_jax.training.mesh import batch_sharding, to_devices
from cumulant_jax.training.meter import Meter
from cumulant_jax.training.tasks.classification import ClassificationTask

MIXING = MixingConfig(mixup=0.4, cutmix=1.0, label_smoothing=0.1)
TIMES = (
    *("training_seconds", "train/examples_per_second", "train/step_ms"),
    *("train/input_wait_ms", "train/dispatch_ms", "train/device_wait_ms"),
)


class Recorder(SilentReporter):
    """Keeps what it is told."""

    def __init__(self):
        self.infos, self.rows, self.summaries = [], [], []

    def on_start(self, info):
        self.infos.append(info)

    def on_step_metrics(self, step, metrics):
        self.rows.append((step, "train", dict(metrics)))

    def on_evaluation(self, step, metrics):
        self.rows.append((step, "eval", dict(metrics)))

    def on_finish(self, summary):
        self.summaries.append(summary)


def final(config, directory):
    experiment = build(config)
    with Checkpoints(RunDirectory(directory).checkpoints, read_only=True) as checkpoints:
        assert checkpoints.latest_step is not None
        return checkpoints.restore(checkpoints.latest_step, experiment.shapes)


def rows(directory):
    kept = read_rows(directory / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in kept]


def test_2n_steps_equal_n_restart_and_n_bit_by_bit(tiny, tmp_path, same):
    config = tiny(
        options={"depth": 2, "dropout": 0.1, "drop_path": 0.2},
        mixing=dict(MIXING.__dict__),
        data__augment=("flip", "crop(padding=1)"),
        ema_decay=0.9,
        gradient_accumulation=2,
        total="14 steps",
        checkpoint_every="4 steps",
        evaluate_every="3 steps",
        log_every="2 steps",
    )
    whole = train(config, tmp_path / "whole", reporter=SilentReporter())
    part = train(config, tmp_path / "parts", reporter=SilentReporter(), stop_after=8)
    assert (part.steps, part.completed) == (8, False)
    recorder = Recorder()
    resumed = train(config, tmp_path / "parts", reporter=recorder)
    assert recorder.infos[0].start_step == 8
    assert recorder.rows[0][0] == 9
    assert whole.completed
    assert resumed.completed
    expected, actual = final(config, tmp_path / "whole"), final(config, tmp_path / "parts")
    assert int(expected.state.step) == 14
    same(actual.state, expected.state)
    assert actual.data == expected.data
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    for name in ("final_metrics", "best_metrics", "best_step", "num_parameters", "steps"):
        assert getattr(resumed, name) == getattr(whole, name), name


def test_what_a_run_leaves_behind(tiny, tmp_path):
    config, recorder = tiny(), Recorder()
    summary = train(config, tmp_path, reporter=recorder)
    assert [(step, part) for step, part, _ in recorder.rows] == [
        *((3, "train"), (6, "train"), (6, "eval")),
        *((9, "train"), (12, "train"), (12, "eval")),
    ]
    assert recorder.summaries == [summary]
    assert summary.completed
    assert summary.steps == 12
    assert summary.final_metrics == recorder.rows[-1][2]
    assert summary.num_parameters == sum(
        leaf.size for leaf in jax.tree.leaves(build(config).shapes.params)
    )
    assert summary.images_per_second == pytest.approx(32e3 / summary.step_time_ms)
    # The state is an argument, in float32: parameters and two moments.
    assert summary.step_memory_bytes > 3 * 4 * summary.num_parameters
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {
        *("config.json", "metrics.csv", "metrics.jsonl", "tensorboard"),
        *("checkpoints", "summary.json", "run.lock"),
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary.to_dict()
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert header[0] == "step"
    assert {key for row in read_rows(tmp_path / "metrics.jsonl") for key in row} == set(header)


def test_a_finished_run_is_returned_as_it_is(tiny, tmp_path):
    config = tiny()
    first = train(config, tmp_path, reporter=SilentReporter())
    recorder = Recorder()
    assert train(config, tmp_path, reporter=recorder) == first
    assert recorder.infos == []
    assert recorder.summaries == [first]


def test_a_changed_config_is_refused_and_nothing_is_written(tiny, tmp_path):
    train(tiny(), tmp_path, reporter=SilentReporter(), stop_after=3)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=r"optimizer.learning_rate: 0.003 → 0.1"):
        train(tiny(optimizer__learning_rate=0.1), tmp_path)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__name": "digit"}, "did you mean 'digits'"),
        ({"data__eval_split": "tests"}, "did you mean 'test'"),
        ({"model__attention": "softmax+linear"}, "attention has 2 entries"),
        ({"task": "clasification"}, "did you mean 'classification'"),
        ({"mesh": "dat=1"}, "did you mean 'data'"),
        ({"optimizer__warmup": "12 steps"}, "optimizer.warmup"),
    ],
)
def test_a_config_that_cannot_be_trained_makes_no_directory(tiny, tmp_path, changes, message):
    directory = tmp_path / "run"
    with pytest.raises(ValueError, match=message) as caught:
        train(tiny(**changes), directory)
    assert "\n" not in str(caught.value)
    assert not directory.exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tiny, tmp_path, monkeypatch):
    # What an evaluation finds has a test of its own.
    monkeypatch.setattr(Experiment, "evaluate", lambda *args: {"loss": 1.0, "accuracy": 0.5})
    config = tiny(
        optimizer__learning_rate=1e37,
        optimizer__warmup=0,
        optimizer__clip_norm=None,
        total="40 steps",
        checkpoint_every="1 steps",
        log_every="1 steps",
    )
    # Which step is the first with a bad metric, without the loop.
    experiment = build(config)
    state, step = experiment.create_state(), experiment.train_step()
    batches = experiment.train_iterator()
    bad, metrics = 0, {}
    while all(np.isfinite(value) for value in metrics.values()):
        batch = to_devices(next(batches), batch_sharding(experiment.mesh))
        state, metrics = step(state, batch)
        bad += 1
    batches.close()
    assert 1 < bad < 40
    with pytest.raises(NonFiniteError, match=rf" is (nan|inf) at step {bad};") as caught:
        train(config, tmp_path, reporter=SilentReporter())
    assert caught.value.step == bad
    restored = final(config, tmp_path)
    assert int(restored.state.step) == bad - 1
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step"] == bad - 1
    assert not (tmp_path / "summary.json").exists()


def test_a_bad_step_between_rows_is_named_too(tiny, tmp_path):
    config = tiny(
        optimizer__learning_rate=1e37,
        optimizer__warmup=0,
        optimizer__clip_norm=None,
        total="40 steps",
        checkpoint_every=0,
        evaluate_every=0,
        log_every=0,
    )
    with pytest.raises(NonFiniteError) as caught:
        train(config, tmp_path, reporter=SilentReporter())
    assert 1 < caught.value.step < 40
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_epochs_and_examples_become_steps(tiny, tmp_path):
    # 1437 images, 32 a step: half an epoch is 22.45 steps.
    config = tiny(total="0.5 epochs", evaluate_every="320 examples", checkpoint_every=0)
    recorder = Recorder()
    summary = train(config, tmp_path, reporter=recorder)
    assert summary.steps == 22
    assert [step for step, part, _ in recorder.rows if part == "eval"] == [10, 20, 22]


class Signals(SilentReporter):
    """Sends this process a signal when a step is reported; "start" is before the first."""

    def __init__(self, *, step, part):
        self.when = (part, step)

    def on_start(self, info):
        if self.when == ("start", info.start_step):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_metrics(self, step, metrics):
        if self.when == ("train", step):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluation(self, step, metrics):
        if self.when == ("eval", step):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("part", "step", "saved"),
    [("train", 2, 2), ("eval", 5, 5), ("train", 5, 5), ("eval", 12, 12)],
)
def test_a_signal_at_any_moment_is_saved_where_it_says(tiny, tmp_path, part, step, saved):
    config = tiny(evaluate_every="5 steps", log_every="2 steps", checkpoint_every=0)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"SIGTERM at step {saved}, which is saved") as caught:
        train(config, tmp_path, reporter=Signals(step=step, part=part))
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    restored = final(config, tmp_path)
    assert int(restored.state.step) == restored.data["step"] == saved
    assert train(config, tmp_path, reporter=SilentReporter()).completed


def test_a_signal_before_the_first_step_does_not_claim_a_saved_step(tiny, tmp_path):
    with pytest.raises(Interrupted, match=r"before step 1; the same command starts") as caught:
        train(tiny(), tmp_path, reporter=Signals(step=0, part="start"))
    assert "saved" not in str(caught.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert train(tiny(), tmp_path, reporter=SilentReporter()).completed


def test_a_signal_before_the_first_step_after_a_restart_names_the_saved_one(tiny, tmp_path):
    train(tiny(), tmp_path, reporter=SilentReporter(), stop_after=4)
    with pytest.raises(Interrupted, match="at step 4, which is saved"):
        train(tiny(), tmp_path, reporter=Signals(step=4, part="start"))


@pytest.mark.parametrize("moment", ["evaluation", "after the last look", "save", "wait", "summary"])
def test_a_signal_outside_the_steps_is_saved_too(tiny, tmp_path, monkeypatch, moment):
    config = tiny(evaluate_every="3 steps", checkpoint_every=0, total="6 steps")
    owner, name = {
        "evaluation": (Experiment, "evaluate"),
        "after the last look": (Meter, "restart_clock"),
        "save": (Checkpoints, "save"),
        "wait": (Checkpoints, "wait"),
        "summary": (RunDirectory, "write_summary"),
    }[moment]
    original, calls = getattr(owner, name), []

    def signalled(*args, **kwargs):
        result = original(*args, **kwargs)
        if not calls:
            calls.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, signalled)
    saved = 3 if moment in ("evaluation", "after the last look") else 6
    with pytest.raises(Interrupted, match=f"at step {saved}, which is saved"):
        train(config, tmp_path, reporter=SilentReporter())
    assert int(final(config, tmp_path).state.step) == saved
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == saved


def test_an_evaluation_that_is_not_finite_is_neither_written_nor_saved(tiny, tmp_path):
    # The only step's own metrics are fine: they are those of the parameters before it.
    config = tiny(optimizer__learning_rate=1e38, optimizer__warmup=0, total="1 steps")
    with pytest.raises(NonFiniteError, match=r"eval/loss is (nan|inf) at step 1"):
        train(config, tmp_path, reporter=SilentReporter())
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert not (tmp_path / "summary.json").exists()
    assert [list(row) for row in read_rows(tmp_path / "metrics.jsonl") if "eval/loss" in row] == []


def test_parameters_that_are_not_finite_are_not_saved_without_an_evaluation_either(tiny, tmp_path):
    config = tiny(optimizer__learning_rate=3e38, optimizer__weight_decay=10.0, optimizer__warmup=0)
    with pytest.raises(NonFiniteError, match="parameter is nan at step 1"):
        train(config, tmp_path, reporter=SilentReporter(), stop_after=1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


class Breaks(SilentReporter):
    """Fails at a row, and notes what is closed."""

    def __init__(self):
        self.closed = []

    def on_step_metrics(self, step, metrics):
        raise RuntimeError("no")

    def close(self):
        self.closed.append("reporter")


def test_an_error_closes_the_reporter_and_the_iterator(tiny, tmp_path, monkeypatch):
    reporter, original = Breaks(), Experiment.train_iterator

    def watched(self):
        iterator = original(self)
        close = iterator.close
        iterator.close = lambda: (reporter.closed.append("iterator"), close())
        return iterator

    monkeypatch.setattr(Experiment, "train_iterator", watched)
    with pytest.raises(RuntimeError, match="no"):
        train(tiny(), tmp_path, reporter=reporter)
    assert reporter.closed[:2] == ["iterator", "reporter"]


def test_what_a_row_costs_is_training_time_and_what_an_evaluation_costs_is_not(tiny, tmp_path):
    class Slow(SilentReporter):
        def on_step_metrics(self, step, metrics):
            time.sleep(0.25)

        def on_evaluation(self, step, metrics):
            time.sleep(1.5)

    config = tiny(log_every="1 steps", evaluate_every="2 steps", checkpoint_every=0)
    config = config.replace(total="4 steps", optimizer__warmup=0)
    summary = train(config, tmp_path, reporter=Slow())
    assert 1 <= summary.step_time_ms * 4 / 1e3 < 3


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tiny, tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.5, 0.8, 0.4])
    monkeypatch.setattr(
        Experiment, "evaluate", lambda *args: {"loss": 1.0, "accuracy": next(accuracies)}
    )
    config = tiny(evaluate_every="3 steps", checkpoint_every="6 steps")
    summary = train(config, tmp_path, reporter=SilentReporter())
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.best_step == summary.best_step == 6
    assert (summary.best_metrics["accuracy"], summary.final_metrics["accuracy"]) == (0.5, 0.4)


def test_a_wrong_stop_after_or_model_makes_no_directory(tiny, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="stop_after: got 'soon'"):
        train(tiny(), tmp_path / "run", stop_after="soon")

    def wrong(self, *args, **kwargs):
        raise ValueError("found while tracing")

    monkeypatch.setattr(ClassificationTask, "loss", wrong)
    with pytest.raises(ValueError, match="found while tracing"):
        train(tiny(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_terminal_is_given_back_when_training_fails(tiny, tmp_path, monkeypatch):
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=True))
    monkeypatch.setattr("cumulant_jax.training.loop.default_reporter", lambda: bar)
    with pytest.raises(NonFiniteError):
        train(tiny(optimizer__learning_rate=1e37, optimizer__clip_norm=None), tmp_path)
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l") >= 0


def test_checkpoints_may_be_elsewhere_and_stay_there(tiny, tmp_path):
    run, place = tmp_path / "run", tmp_path / "bucket" / "x"
    train(tiny(), run, reporter=SilentReporter(), stop_after=6, checkpoints=place)
    assert not (run / "checkpoints").exists()
    assert (place / "6").is_dir()
    with pytest.raises(ValueError, match=r"checkpoints: got .*other'.* are in .*bucket/x'"):
        train(tiny(), run, reporter=SilentReporter(), checkpoints=tmp_path / "other")
    with pytest.raises(ValueError, match=r"checkpoints: .*x' holds checkpoints of another run"):
        train(tiny(seed=1), tmp_path / "second", reporter=SilentReporter(), checkpoints=place)
    assert not (tmp_path / "second").exists()
    assert train(tiny(), run, reporter=SilentReporter()).completed
    assert (place / "12").is_dir()
    assert RunDirectory(run).checkpoints == epath.Path(place)
