import io
import re

import pytest
from rich.console import Console

from cumulant_jax.training import PlainLines, ProgressBar, RunInfo, Summary, default_reporter
from cumulant_jax.training.progress import remaining_seconds

INFO = RunInfo(
    label="vit_nano2 linear on digits",
    unit="images",
    start_step=20,
    total_steps=100,
    num_train=1437,
    batch_size=64,
    num_parameters=152074,
    num_devices=1,
    compile_seconds=1.0,
)
SUMMARY = Summary(
    steps=100,
    completed=True,
    final_metrics={"loss": 0.5, "accuracy": 0.875},
    best_metrics={},
    best_step=100,
    num_parameters=152074,
    images_per_second=1.0,
    step_time_ms=2.0,
    step_memory_bytes=None,
    compile_seconds=0.1,
    wall_seconds=3.0,
)


def run(reporter):
    reporter.on_start(INFO)
    metrics = {"loss": 1.25, "accuracy": 0.5, "grad_norm": 3.0, "examples_per_second": 1234.5}
    reporter.on_step_metrics(60, metrics)
    reporter.on_evaluation(60, {"loss": 1.5, "accuracy": 0.25})
    reporter.on_finish(SUMMARY)


def test_plain_lines():
    stream = io.StringIO()
    reporter = default_reporter(stream)
    assert isinstance(reporter, PlainLines)
    run(reporter)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert "152,074 parameters" in lines[0]
    assert "resuming at step 20" in lines[0]
    assert re.fullmatch(
        r"step 60/100  loss 1\.2500  accuracy 50\.00%  123[45] images/s  ETA 0:00", lines[1]
    )
    assert lines[2] == "evaluation at step 60  loss 1.5000  accuracy 25.00%"
    assert lines[3] == "finished at step 100 after 3.0 s  loss 0.5000  accuracy 87.50%"
    assert "\x1b" not in stream.getvalue()


def test_the_bar_shows_step_loss_accuracy_speed_and_time_left():
    stream = io.StringIO()
    run(ProgressBar(Console(file=stream, force_terminal=True, width=140)))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for part in ("60/100", "loss 1.2500", "accuracy 50.00%", "images/s", "ETA"):
        assert part in text, part
    assert "evaluation at step 60" in text
    # The cursor that the bar hides is back at the end.
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l") >= 0


def test_the_time_left_counts_the_steps_of_this_process_only():
    # 40 of 80 steps in 10 s: 40 left, 10 s.
    assert remaining_seconds(INFO, 60, 10.0) == pytest.approx(10.0)
    assert remaining_seconds(INFO, 20, 10.0) == float("inf")
