import io
import math

import pytest
from rich.console import Console
from rich.text import Text

from cumulant_jax.analysis import RunResult
from cumulant_jax.training import RunInfo
from experiments.comparison_view import LiveTable, PlainLines, Progress, make_view

CELLS = [("softmax", 0), ("softmax", 1), ("linear", 0), ("linear", 1)]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def info(**changes) -> RunInfo:
    values = {
        "label": "vit",
        "unit": "images",
        "start_step": 0,
        "total_steps": 100,
        "num_train": 1000,
        "batch_size": 10,
        "num_parameters": 1234,
        "num_devices": 1,
        "compile_seconds": 1.0,
    }
    return RunInfo(**{**values, **changes})


def result(kind, seed, seconds) -> RunResult:
    return RunResult(
        kind=kind,
        seed=seed,
        accuracy=0.875,
        best_accuracy=0.9,
        parameters=1234,
        images_per_second=5000.0,
        step_time_ms=2.0,
        step_memory_bytes=1_000_000,
        steps=100,
        wall_seconds=seconds,
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return Progress(CELLS, clock=clock)


def test_nothing_is_known_before_the_first_step(progress):
    assert progress.remaining_seconds() == math.inf
    progress.begin(CELLS[0])
    assert progress.remaining_seconds() == math.inf


def test_the_current_pace_stands_for_all_runs(progress, clock):
    view = PlainLines(progress, io.StringIO())
    view.begin(CELLS[0])
    view.on_start(info())
    clock.now += 5
    view.on_step_metrics(25, {})
    # A run takes 20 s: 15 s of this one and three more.
    assert progress.remaining_seconds() == pytest.approx(15 + 3 * 20)


def test_the_pace_counts_only_the_steps_of_this_process(progress, clock):
    view = PlainLines(progress, io.StringIO())
    view.begin(CELLS[0])
    view.on_start(info(start_step=50))
    clock.now += 5
    view.on_step_metrics(75, {})
    assert progress.remaining_seconds() == pytest.approx(5 + 3 * 20)


def test_finished_runs_stand_for_their_kind_and_their_mean_for_others(progress):
    progress.results["softmax", 0] = result("softmax", 0, 30.0)
    assert progress.remaining_seconds() == pytest.approx(3 * 30)
    progress.results["linear", 0] = result("linear", 0, 10.0)
    assert progress.remaining_seconds() == pytest.approx(30 + 10)


def test_nothing_is_left_at_the_end(progress):
    for kind, seed in CELLS:
        progress.begin((kind, seed))
        progress.end(result(kind, seed, 10.0))
    assert progress.remaining_seconds() == 0


def test_plain_lines_tell_start_life_signs_and_end(progress, clock):
    stream = io.StringIO()
    progress.results["softmax", 0] = result("softmax", 0, 20.0)
    with PlainLines(progress, stream) as view:
        view.begin(CELLS[1])
        view.on_start(info(start_step=40))
        view.on_evaluation(50, {"accuracy": 0.5, "loss": 1.0})
        for step in range(51, 61):
            clock.now += 1
            view.on_step_metrics(step, {"loss": 0.5})
        view.end(result("softmax", 1, 20.0))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "4 runs, 1 of them finished earlier"
    assert lines[1] == (
        "[2/4] softmax seed 1: 1,234 parameters, 100 steps of 10 images, resuming at step 40"
    )
    # One line in five seconds, however often the metrics come.
    assert len(lines) == 5
    assert lines[2].startswith("[2/4] softmax seed 1  step 55/100  training loss 0.5000  test acc")
    assert "test accuracy 50.00%" in lines[2]
    # 5 s for 15 steps: 15 s are left of this run; the two of the other kind take 20 s each.
    assert lines[2].endswith("all runs: ETA 0:55")
    assert lines[4] == "[2/4] softmax seed 1 finished: test accuracy 87.50% after 20.0 s"


def test_the_live_table_fills(progress, clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False)
    view = LiveTable(progress, console)

    def drawn():
        with console.capture() as capture:
            console.print(view.renderable())
        return [line for line in Text.from_ansi(capture.get()).plain.splitlines() if line.strip()]

    def row(kind):
        (line,) = [line for line in drawn() if f" {kind} " in line]
        return line

    assert "waiting" in row("softmax")
    view.begin(CELLS[0])
    assert "seed 0: compiling" in row("softmax")
    view.on_start(info())
    clock.now += 10
    view.on_step_metrics(50, {"examples_per_second": 4321.0})
    view.on_evaluation(50, {"accuracy": 0.5})
    assert "seed 0: 50/100  50.0 %" in row("softmax")
    assert "0/4 runs" in drawn()[-1]
    assert "ETA 1:10" in drawn()[-1]
    view.end(result("softmax", 0, 20.0))
    view.begin(CELLS[1])
    view.end(result("softmax", 1, 20.0))
    assert " ".join(row("softmax").split()) == "softmax 87.5 ± 0.0 5,000 2.00 ± 0.00 done"
    assert "waiting" in row("linear")
    assert "2/4 runs" in drawn()[-1]
    assert "ETA 0:40" in drawn()[-1]


def test_a_terminal_gets_the_table_and_a_pipe_gets_lines(progress):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert isinstance(make_view(progress, Terminal()), LiveTable)
    assert isinstance(make_view(progress, io.StringIO()), PlainLines)
