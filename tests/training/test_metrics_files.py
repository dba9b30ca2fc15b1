import csv
import json
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from cumulant_jax.training import read_rows
from cumulant_jax.training.metrics_files import MetricsFiles

COLUMNS = ["epoch", "train/loss", "eval/loss"]


def csv_rows(directory):
    with (directory / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def events(directory):
    """Reads TensorBoard's record files: (step, tag, value), and where a restart discards steps."""
    found, restarts = [], []
    for file in sorted((directory / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            if event.HasField("session_log"):
                restarts.append(event.step)
    return found, restarts


def test_rows_are_the_same_in_all_three_files(tmp_path):
    with MetricsFiles(tmp_path, COLUMNS, after_step=0) as files:
        files.write(2, {"epoch": 0.5, "train/loss": 1.5})
        files.write(2, {"epoch": 0.5, "eval/loss": 2.0})
        files.write(4, {"epoch": 1.0, "train/loss": 1.25})
        # Already there, before anything is closed.
        assert len(read_rows(tmp_path / "metrics.jsonl")) == 3
    expected = [
        {"step": 2, "epoch": 0.5, "train/loss": 1.5},
        {"step": 2, "epoch": 0.5, "eval/loss": 2.0},
        {"step": 4, "epoch": 1.0, "train/loss": 1.25},
    ]
    assert csv_rows(tmp_path) == read_rows(tmp_path / "metrics.jsonl") == expected
    found, restarts = events(tmp_path)
    assert found == [(2, "train/loss", 1.5), (2, "eval/loss", 2.0), (4, "train/loss", 1.25)]
    assert restarts == []


def test_a_resumed_run_drops_the_rows_it_will_write_again(tmp_path):
    with MetricsFiles(tmp_path, COLUMNS, after_step=0) as files:
        for step in (2, 4, 6):
            files.write(step, {"train/loss": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("8,,4.")
    with MetricsFiles(tmp_path, COLUMNS, after_step=4) as files:
        files.write(6, {"train/loss": 30.0})
    expected = [{"step": 2, "train/loss": 1.0}, {"step": 4, "train/loss": 2.0}]
    expected.append({"step": 6, "train/loss": 30.0})
    assert csv_rows(tmp_path) == read_rows(tmp_path / "metrics.jsonl") == expected
    assert events(tmp_path)[1] == [5]


def test_a_run_that_lost_everything_starts_with_empty_files(tmp_path):
    for _ in range(2):
        with MetricsFiles(tmp_path, COLUMNS, after_step=0) as files:
            files.write(1, {"train/loss": 1.0})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 1.0}]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 1.0}


@pytest.mark.parametrize("bad", ['{"step": 2, "a', "3", '{"loss": 1}', "", "\xff"])
def test_a_bad_line_is_named_and_later_rows_are_kept(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    content = f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n'.encode("latin-1")
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: got"):
        MetricsFiles(tmp_path, COLUMNS, after_step=3)
    assert file.read_bytes() == content


def test_only_a_cut_last_line_is_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2')
    assert read_rows(file) == [{"step": 1}]
    file.write_text('{"step": 1}\n{"step": 2}')
    assert read_rows(file) == [{"step": 1}, {"step": 2}]


def test_what_json_does_not_know_is_not_written(tmp_path):
    with (
        MetricsFiles(tmp_path, COLUMNS, after_step=0) as files,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        files.write(1, {"train/loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert csv_rows(tmp_path) == []
