"""What can go wrong from outside, done to real runs; docs/reliability.md tells what comes of it."""

import random
import signal
import textwrap
import time

import numpy as np
import pytest

from cumulant_jax.training import (
    NonFiniteError,
    SilentReporter,
    read_rows,
    train,
)
from cumulant_jax.training.tasks import ClassificationTask

TRAIN = ("-m", "experiments.train", "--config")


def rows(directory):
    names = ("train/loss", "eval/loss")
    return [
        (row["step"], *(row[name] for name in names if name in row))
        for row in read_rows(directory / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tiny, start, config_file, tmp_path):
    """Each is killed 0 to 10 s after its start: while it imports, compiles, trains or saves."""
    config = tiny(total="3000 steps", checkpoint_every="100 steps", evaluate_every="100 steps")
    config = config.replace(log_every="50 steps", ema_decay=0.9, data__augment=("flip",))
    run, file, moment = tmp_path / "run", config_file(config), random.Random(0)
    for number in range(20):
        process = start(*TRAIN, file, "--directory", run)
        time.sleep(moment.uniform(0, 6) + 4 * (number % 2))
        code, _, errors = process.end(signal.SIGKILL)
        assert code in (0, -signal.SIGKILL), errors
    code, _, errors = start(*TRAIN, file, "--directory", run).end()
    assert code == 0, errors
    train(config, tmp_path / "alone", reporter=SilentReporter())
    assert rows(run) == rows(tmp_path / "alone")


# Trains like experiments.train, but no file of it may grow beyond some bytes: the disk is full.
FULL_DISK = """
    import os, resource, signal, sys
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # its files are shared with other tests
    from experiments import cli, train
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(cli.run(train.main, train.make_parser()))
"""


def test_a_disk_that_is_full_ends_the_run_with_one_error_and_space_lets_it_go_on(
    tiny, start, config_file, tmp_path
):
    # A state of 3 x 100 kB and more; the files of metrics stay below the limit.
    config = tiny(options={"dim": 64})
    run, file, script = tmp_path / "run", config_file(config), tmp_path / "full_disk.py"
    script.write_text(textwrap.dedent(FULL_DISK))
    code, _, errors = start(script, 60_000, "--config", file, "--directory", run).end()
    assert code == 2
    # Orbax's own thread prints a traceback of its own around it.
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "a checkpoint could not be written to" in line
    assert "With space on the disk, the same command goes on." in line
    train(config, run, reporter=SilentReporter())
    train(config, tmp_path / "alone", reporter=SilentReporter())
    assert rows(run)[-1] == rows(tmp_path / "alone")[-1]


def test_a_nan_in_a_batch_stops_before_anything_of_it_is_saved(tiny, tmp_path, monkeypatch):
    """Labels and uint8 images hold no NaN; what a task makes of them might."""
    prepare = ClassificationTask.prepare
    config = tiny(total="12 steps", checkpoint_every="3 steps", log_every="1 steps")
    train(config, tmp_path, reporter=SilentReporter(), stop_after=6)

    def poisoned(self, batch, **options):
        batch = prepare(self, batch, **options)
        return {**batch, "image": batch["image"].at[0, 0, 0, 0].set(np.nan)}

    monkeypatch.setattr(ClassificationTask, "prepare", poisoned)
    with pytest.raises(NonFiniteError, match="loss is nan at step 7"):
        train(config, tmp_path, reporter=SilentReporter())
    assert max(int(f.name) for f in (tmp_path / "checkpoints").iterdir()) == 6
    monkeypatch.undo()
    assert train(config, tmp_path, reporter=SilentReporter()).completed


class Slow:
    """An iterator that takes its time."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __next__(self):
        time.sleep(0.05)
        return next(self._iterator)

    def __getattr__(self, name):
        return getattr(self._iterator, name)


def test_input_that_is_slow_is_told_in_the_log(tiny, tmp_path, monkeypatch, capsys):
    original = ClassificationTask.train_iterator
    monkeypatch.setattr(
        ClassificationTask, "train_iterator", lambda *a, **k: Slow(original(*a, **k))
    )
    train(tiny(), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 12/")]
    assert "waits for input" in lines[0]
    last = [row for row in read_rows(tmp_path / "metrics.jsonl") if "train/step_ms" in row][-1]
    assert last["train/input_wait_ms"] > 0.5 * last["train/step_ms"]


class JumpingClock(SilentReporter):
    """Puts the clock back by ten minutes, by an hour more, and forth by ten minutes."""

    def __init__(self, monkeypatch):
        self._patch, self._real = monkeypatch, time.time

    def on_step_metrics(self, step, metrics):
        # Orbax gives a save that seems to take more than 20 minutes up; see docs/reliability.md.
        minutes = {3: -10, 9: -70, 12: -60}.get(step)
        if minutes is not None:
            self._patch.setattr(time, "time", lambda: self._real() + 60 * minutes)


def test_a_clock_that_jumps_moves_no_figure(tiny, tmp_path, monkeypatch):
    summary = train(tiny(), tmp_path, reporter=JumpingClock(monkeypatch))
    assert summary.completed
    assert 0 < summary.wall_seconds < 500
    assert all(row["training_seconds"] < 500 for row in read_rows(tmp_path / "metrics.jsonl"))
