"""Comparisons: the whole thing on a miniature, its parts with a training that only pretends."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cumulant_jax import training
from cumulant_jax.training import Interrupted, NonFiniteError, Summary
from cumulant_jax.training.run_directory import RunDirectory
from experiments import compare
from experiments.comparison_plan import parse_kinds, parse_seeds
from experiments.comparison_view import PlainLines

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "digits.py"
MINIATURE = (
    "--config.total=6 steps",
    "--config.evaluate_every=3 steps",
    "--config.checkpoint_every=3 steps",
    "--config.log_every=1 steps",
    "--config.optimizer.warmup=1 steps",
    "--config.batch_size=32",
    "--config.eval_batch_size=360",
)


def run(directory, *extra, kinds="softmax,linear", seeds="0,1"):
    return compare.command_line(
        [
            f"--config={CONFIG}",
            *(f"--kinds={kinds}", f"--seeds={seeds}", f"--directory={directory}"),
            *MINIATURE,
            *extra,
        ]
    )


def read_csv(directory):
    with (directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Rows(HTMLParser):
    """The cells of a page's tables."""

    def __init__(self, text):
        super().__init__()
        self.rows, self._in_cell = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data


class InterruptingView(PlainLines):
    """Presses Ctrl-C when a run reaches a step."""

    def __init__(self, progress, cell, step):
        super().__init__(progress)
        self._at = (cell, step)

    def on_step_metrics(self, step, metrics):
        super().on_step_metrics(step, metrics)
        if self._at == (self.progress.current, step):
            os.kill(os.getpid(), signal.SIGINT)


def pretend(config, path, *, reporter, accuracy=0.5):
    """What `train` leaves behind, without training."""
    directory = RunDirectory(path)
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.write_config(config)
    rows = [{"step": step, "eval/accuracy": accuracy} for step in (3, 6)]
    (directory.path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    summary = Summary(
        steps=6,
        completed=True,
        final_metrics={"accuracy": accuracy, "loss": 1.0},
        best_metrics={"accuracy": accuracy, "loss": 1.0},
        best_step=6,
        num_parameters=1000,
        images_per_second=100.0,
        step_time_ms=10.0,
        step_memory_bytes=None,
        compile_seconds=0.1,
        wall_seconds=1.0,
    )
    directory.write_summary(summary)
    return summary


def test_a_comparison_is_interrupted_resumed_and_reported(tmp_path, monkeypatch, capsys):
    directory = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(
            compare, "make_view", lambda progress: InterruptingView(progress, ("softmax", 1), 4)
        )
        assert run(directory) == 130
    assert "report so far" in capsys.readouterr().err
    assert [(row["kind"], row["seed"]) for row in read_csv(directory)] == [("softmax", "0")]
    for name in ("report.html", "results.md"):
        assert "Partial: 1 of 4 runs are finished." in (directory / name).read_text()
    finished = directory / "softmax" / "seed-0" / "summary.json"
    before = finished.read_bytes(), finished.stat().st_mtime_ns

    assert run(directory) == 0
    out = capsys.readouterr().out
    assert "4 runs, 1 of them finished earlier" in out
    assert re.search(r"softmax seed 1: .* resuming at step [45]\b", out)
    assert "softmax seed 0:" not in out
    assert (finished.read_bytes(), finished.stat().st_mtime_ns) == before
    check_files(directory)

    # The interrupted run ends as the same run does without any interruption.
    config = RunDirectory(directory / "softmax" / "seed-1").config()
    whole = training.train(config, tmp_path / "whole", reporter=training.SilentReporter())
    (row,) = [r for r in read_csv(directory) if (r["kind"], r["seed"]) == ("softmax", "1")]
    assert float(row["accuracy"]) == whole.final_metrics["accuracy"]

    def no_training(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(compare, "train", no_training)
    assert run(directory) == 0, "a finished comparison only writes its reports"


def check_files(directory):
    """The reports agree with each other: the page and the Markdown show the CSV's means."""
    rows = read_csv(directory)
    assert [(row["kind"], row["seed"]) for row in rows] == [
        ("softmax", "0"), ("softmax", "1"), ("linear", "0"), ("linear", "1"),
    ]  # fmt: skip
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (directory / "report.html").read_text()
    markdown = (directory / "results.md").read_text()
    assert "Partial" not in page + markdown
    assert '"batch_size": 32' in page.replace("&quot;", '"')
    assert "python -m experiments.compare" in page
    for kind in ("softmax", "linear"):
        own = [row for row in rows if row["kind"] == kind]
        accuracies = 100 * np.array([float(row["accuracy"]) for row in own])
        accuracy = f"{accuracies.mean():.1f} ± {accuracies.std(ddof=1):.1f}"
        speed = f"{np.mean([float(row['images_per_second']) for row in own]):,.0f}"
        parameters = f"{int(own[0]['parameters']):,}"
        (shown,) = [r for r in Rows(page).rows if r[0] == kind and "±" in r[1]]
        assert shown[1:4] == [accuracy, parameters, speed]
        (line,) = [text for text in markdown.splitlines() if text.startswith(f"| {kind} ")]
        assert [cell.strip() for cell in line.split("|")[2:5]] == [accuracy, parameters, speed]


def test_kinds_share_everything_but_attention(tmp_path, monkeypatch):
    configs = []

    def note(config, path, *, reporter):
        configs.append(config)
        return pretend(config, path, reporter=reporter)

    monkeypatch.setattr(compare, "train", note)
    monkeypatch.setattr(compare, "write_reports", lambda *args: None)
    assert run(tmp_path, kinds="softmax,cumulant3,tssa,xca,mssa", seeds="0,5") == 0
    assert [(c.model.attention, c.seed) for c in configs[:3]] == [
        ("softmax", 0), ("softmax", 5), ("cumulant3", 0),
    ]  # fmt: skip
    by_seed = [c for c in configs if c.seed == 5]
    assert len(by_seed) == 5
    for config in by_seed[1:]:
        (change,) = training.difference(by_seed[0], config)
        assert change.startswith("model.attention: softmax")


def test_kinds_and_seeds_can_be_added_later(tmp_path, monkeypatch):
    trained = []

    def note(config, path, *, reporter):
        trained.append((config.model.attention, config.seed))
        return pretend(config, path, reporter=reporter)

    monkeypatch.setattr(compare, "train", note)
    assert run(tmp_path, kinds="softmax", seeds="0") == 0
    assert run(tmp_path, kinds="softmax,linear+softmax+linear", seeds="0,1") == 0
    assert trained == [
        ("softmax", 0),
        ("softmax", 1),
        ("linear+softmax+linear", 0),
        ("linear+softmax+linear", 1),
    ]
    assert len(read_csv(tmp_path)) == 4


def test_a_changed_config_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "train", pretend)
    assert run(tmp_path, kinds="linear", seeds="1") == 0
    report = (tmp_path / "report.html").stat().st_mtime_ns
    capsys.readouterr()
    assert run(tmp_path, "--config.batch_size=16") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "batch_size: 32 → 16" in error
    assert str(tmp_path / "linear" / "seed-1") in error
    assert not (tmp_path / "softmax").exists()
    assert (tmp_path / "report.html").stat().st_mtime_ns == report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": "softmax,cumulent3"}, "unknown attention kind 'cumulent3'; did you mean"),
        ({"kinds": "softmax,softmax+linaer"}, "unknown attention kind 'linaer'; did you mean"),
        ({"kinds": ","}, "--kinds: got ',', expected at least one"),
        ({"kinds": "tssa,tssa"}, "--kinds: tssa is there twice"),
        ({"seeds": "0,x"}, "--seeds: got 'x', expected whole numbers"),
        ({"seeds": "1,01"}, "--seeds: 1 is there twice"),
        ({"seeds": "4294967296"}, "--seeds: got 4294967296, expected"),
        ({"kinds": "softmax,linear+tssa"}, "--kinds: linear+tssa cannot be trained"),
        ({"seeds": "-1"}, "--seeds: got '-1', expected whole numbers"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, capsys, arguments, message):
    assert run(tmp_path / "runs", **arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_near_name_of_a_kind_is_given(tmp_path, capsys):
    run(tmp_path, kinds="cumulent3")
    assert "did you mean 'cumulant3'?" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_is_prepared_stops_in_order(tmp_path, monkeypatch, capsys, number):
    def stopped(config, path, *, reporter):
        if config.seed == 1:
            os.kill(os.getpid(), number)
            raise AssertionError("the signal was not noticed")
        return pretend(config, path, reporter=reporter)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(compare, "train", stopped)
    assert run(tmp_path) == 128 + number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert "Partial: 1 of 4" in (tmp_path / "results.md").read_text()
    assert f"stopped by {signal.Signals(number).name} between two runs" in capsys.readouterr().err


def test_an_interruption_reaches_the_caller(tmp_path, monkeypatch):
    def stopped(config, path, *, reporter):
        raise Interrupted(signal.SIGTERM, "stopped at step 3")

    monkeypatch.setattr(compare, "train", stopped)
    assert run(tmp_path) == 143


def test_a_report_exists_before_the_first_run_ends(tmp_path, monkeypatch):
    seen = []

    def look(config, path, *, reporter):
        seen.append((tmp_path / "report.html").read_text())
        return pretend(config, path, reporter=reporter)

    monkeypatch.setattr(compare, "train", look)
    run(tmp_path, kinds="softmax", seeds="0,1")
    assert "Partial: 0 of 2 runs" in seen[0]
    assert "Partial: 1 of 2 runs" in seen[1]
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))


def test_kinds_and_seeds_are_read_in_order():
    assert parse_kinds(" tssa,softmax+linear ,cumulant4") == ["tssa", "softmax+linear", "cumulant4"]
    assert parse_seeds("3, 0") == [3, 0]


def test_a_run_that_fails_is_shown_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def fails(config, path, *, reporter):
        if config.model.attention == "softmax":
            raise NonFiniteError(7, "loss", float("nan"))
        return pretend(config, path, reporter=reporter)

    monkeypatch.setattr(compare, "train", fails)
    assert run(tmp_path, seeds="0") == 1
    out, errors = capsys.readouterr()
    assert "[1/2] softmax seed 0 failed: training stopped: loss is nan at step 7" in out
    assert errors.startswith("error: softmax seed 0 failed: training stopped")
    assert errors.count("\n") == 1
    assert [row["kind"] for row in read_csv(tmp_path)] == ["linear"]
    for name in ("results.md", "report.html"):
        assert "1 failed: softmax seed 0" in (tmp_path / name).read_text()


@pytest.mark.parametrize("name", ["results.csv", "results.md", "curves.png", "report.html"])
def test_files_of_nobody_are_not_overwritten(tmp_path, capsys, name):
    (tmp_path / name).write_text("mine")
    assert run(tmp_path, kinds="softmax") == 2
    assert f"holds {name}, but no comparison" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    code = (
        "import runpy, sys; sys.modules['matplotlib'] = None;"
        "runpy.run_module('experiments.compare', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CONFIG.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'pip install "cumulant_jax[analysis]"' in done.stderr


def test_every_run_is_a_command_of_its_own_and_a_last_one_collects(tmp_path, capsys, monkeypatch):
    directory = tmp_path / "sweep"
    assert run(directory, "--list") == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [command[-2:] for command in commands] == [["--cell", str(n)] for n in range(4)]
    assert not directory.exists()
    done = []

    def note(config, path):
        done.append((config.model.attention, config.seed))
        pretend(config, path, reporter=None)

    monkeypatch.setattr(compare, "train", note)
    for command in (commands[3], commands[0]):
        assert command[:3] == ["python", "-m", "experiments.compare"]
        assert compare.command_line(command[3:]) == 0
    assert done == [("linear", 1), ("softmax", 0)]
    assert not (directory / "results.csv").exists()
    assert run(directory, "--collect") == 0
    assert "2 of 4 runs are finished" in capsys.readouterr().out
    rows = [(row["kind"], row["seed"]) for row in read_csv(directory)]
    assert rows == [("softmax", "0"), ("linear", "1")]
    assert len(done) == 2


def test_a_run_that_there_is_not_is_named(tmp_path, capsys):
    assert run(tmp_path, "--cell", "4") == 2
    assert "--cell: got 4, expected 0 to 3" in capsys.readouterr().err
