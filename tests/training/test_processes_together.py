"""Several real processes on this machine that train together, over gloo."""

import json
import signal
import socket

import pytest

from cumulant_jax.training import SilentReporter, read_rows, train
from cumulant_jax.training.mesh import DataShare, data_share, make_mesh
from cumulant_jax.training.processes import ProcessFlags, _started_with_others

TRAIN = ("-m", "experiments.train", "--config")


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture
def start_all(start, monkeypatch):
    """Starts `count` processes of one command, with `devices` CPU devices each."""

    def start_all(count, *arguments, devices=1):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
        where = f"localhost:{free_port()}"
        flags = [f"--coordinator={where}", f"--num-processes={count}"]
        return [start(*arguments, *flags, f"--process-id={i}") for i in range(count)]

    return start_all


def said(output):
    """The lines that are ours."""
    return [line for line in output.splitlines() if not line.startswith("[Gloo]")]


def losses(directory):
    names = ("train/loss", "eval/loss", "eval/accuracy")
    rows = read_rows(directory / "metrics.jsonl")
    return [(row["step"], *(row[name] for name in names if name in row)) for row in rows]


def same_losses(one, other):
    assert [row[0] for row in one] == [row[0] for row in other]
    for row, expected in zip(one, other, strict=True):
        assert row == pytest.approx(expected, rel=2e-4)


def test_two_processes_train_like_one_and_resume_as_one(tiny, start_all, config_file, tmp_path):
    config = tiny(mesh="fsdp=-1", data__augment=("flip",), options={"dropout": 0.1})
    train(config, tmp_path / "alone", reporter=SilentReporter())
    run = tmp_path / "together"
    file = config_file(config)
    processes = start_all(2, *TRAIN, file, "--directory", run, "--stop-after=6")
    (code, output, errors), (other_code, other_output, other_errors) = (p.end() for p in processes)
    assert (code, other_code) == (0, 0), (errors, other_errors)
    assert "on 2 devices" in output
    assert "stopped at step 6" in output
    assert said(other_output) == []  # only the first process shows and writes anything
    # One process goes on where two stopped, and evaluates on its own.
    train(config, run, reporter=SilentReporter())
    same_losses(losses(run), losses(tmp_path / "alone"))
    processes = start_all(2, "-m", "experiments.evaluate", "--directory", run, "--batch-size=50")
    (code, output, errors), (_, other_output, _) = (process.end() for process in processes)
    assert code == 0, errors
    assert said(other_output) == []
    expected = read_rows(run / "metrics.jsonl")[-1]["eval/loss"]
    assert json.loads(said(output)[-1])["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_signal_to_one_process_saves_and_stops_all(tiny, start_all, config_file, tmp_path):
    config = tiny(total="100000 steps", evaluate_every=0, checkpoint_every=0)
    run = tmp_path / "run"
    processes = start_all(2, *TRAIN, config_file(config), "--directory", run)
    processes[0].wait_for(lambda: len(losses(run)) > 2)
    processes[1].signal(signal.SIGTERM)
    (code, output, errors), (other_code, _, other_errors) = (p.end() for p in processes)
    assert (code, other_code) == (143, 143), (errors, other_errors)
    step = json.loads((run / "summary.json").read_text())["steps"]
    assert f"stopped at step {step}" in output
    assert [int(f.name) for f in (run / "checkpoints").iterdir()] == [step]
    for text in (errors, other_errors):
        assert f"stopped by SIGTERM at step {step}, which is saved" in text


def test_a_killed_process_ends_the_others_with_a_message_and_nothing_is_lost(
    tiny, start_all, config_file, tmp_path
):
    config = tiny(total="100000 steps", evaluate_every=0)
    run = tmp_path / "run"
    processes = start_all(2, *TRAIN, config_file(config), "--directory", run)
    processes[0].wait_for(lambda: (run / "checkpoints" / "6").is_dir())
    assert processes[1].end(signal.SIGKILL)[0] == -signal.SIGKILL
    code, _, errors = processes[0].end()
    assert code == 1
    assert "process 0 stops, as it lost another one" in errors
    saved = max(int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdecimal())
    for directory in (run, tmp_path / "alone"):
        train(config, directory, reporter=SilentReporter(), stop_after=saved + 6)
    same_losses(losses(run), losses(tmp_path / "alone"))


@pytest.mark.slow
def test_four_processes_share_tokens_and_two_go_on(tiny, start_all, config_file, tmp_path):
    options = {"class_token": False, "dropout": 0.1}
    config = tiny(mesh="fsdp=2,sequence=2", options=options, model__attention="cumulant3")
    train(config.replace(mesh="data=-1"), tmp_path / "alone", reporter=SilentReporter())
    run, file = tmp_path / "run", config_file(config)
    for count, devices, flags in ((4, 1, ["--stop-after=6"]), (2, 2, [])):
        processes = start_all(count, *TRAIN, file, "--directory", run, *flags, devices=devices)
        ends = [process.end() for process in processes]
        assert [code for code, _, _ in ends] == [0] * count, ends
    same_losses(losses(run), losses(tmp_path / "alone"))


def test_a_wrong_config_ends_all(tiny, start_all, config_file, tmp_path):
    config = tiny(batch_size=33, mesh="data=-1")
    for process in start_all(2, *TRAIN, config_file(config), "--directory", tmp_path / "run"):
        code, _, errors = process.end()
        assert code == 2
        assert "config key batch_size: got 33, expected a multiple of 2" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_processes": 2}, "--coordinator and --process-id: missing"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "expected HOST:PORT"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "expected 0 to 1"),
        ({"coordinator": "h:1", "num_processes": 0, "process_id": 0}, "at least 1"),
    ],
)
def test_wrong_flags_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        ProcessFlags(**flags)


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),  # in a job, without srun
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
    ],
)
def test_launchers_are_recognised(variables, several):
    assert _started_with_others(variables) is several


class Device:
    def __init__(self, process_index):
        self.process_index = process_index


class FakeSharding:
    """Devices in the order of a mesh, each with its rows of a batch."""

    def __init__(self, rows):
        self.rows = rows

    def devices_indices_map(self, shape):
        return self.rows


@pytest.mark.parametrize(
    ("processes", "rows", "shares"),
    [
        # One row of a batch of four on each device.
        ((0, 0, 1, 1), (0, 1, 2, 3), [DataShare(0, 2), DataShare(1, 2)]),
        ((0, 1, 2, 3), (0, 1, 2, 3), [DataShare(i, 4) for i in range(4)]),
        # Tokens split between processes: both of a pair read the same rows.
        ((0, 1, 2, 3), (0, 0, 1, 1), [DataShare(0, 2)] * 2 + [DataShare(1, 2)] * 2),
        ((0, 1), (0, 0), [DataShare(0, 1)] * 2),
        ((0, 0, 1, 1), (0, 2, 1, 3), None),
        ((0, 0, 0, 1), (0, 1, 2, 3), None),
    ],
)
def test_processes_with_the_same_rows_read_the_same_part(monkeypatch, processes, rows, shares):
    found = {
        Device(process): (slice(row, row + 1),)
        for process, row in zip(processes, rows, strict=True)
    }
    mesh = make_mesh("data=-1")
    monkeypatch.setattr(
        "cumulant_jax.training.mesh.batch_sharding", lambda mesh: FakeSharding(found)
    )
    monkeypatch.setattr("cumulant_jax.training.mesh.batch_divisor", lambda mesh: max(rows) + 1)
    if shares is None:
        with pytest.raises(ValueError, match="unequal or overlapping parts"):
            data_share(mesh, process_index=0)
        return
    assert [data_share(mesh, process_index=i) for i in range(len(shares))] == shares
