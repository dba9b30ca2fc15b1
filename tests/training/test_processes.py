"""Training in processes of their own: killed, interrupted, and on several devices."""

import json
import os
import signal
import textwrap

import pytest

from cumulant_jax.training import (
    Checkpoints,
    RunDirectory,
    SilentReporter,
    build,
    read_rows,
    train,
)

TRAIN = ("-m", "experiments.train", "--config")


def endless(tiny, **changes):
    return tiny(
        total="1000000 steps",
        checkpoint_every="50 steps",
        evaluate_every="50 steps",
        log_every="10 steps",
        ema_decay=0.9,
        data__augment=("flip",),
        options={"dropout": 0.1},
        **changes,
    )


def logged_step(directory):
    rows = read_rows(directory / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def saved_steps(directory):
    folder = directory / "checkpoints"
    return sorted(int(f.name) for f in folder.glob("*") if f.name.isdigit())


def state_at(config, directory, step):
    with Checkpoints(RunDirectory(directory).checkpoints, read_only=True) as checkpoints:
        assert checkpoints.latest_step == step
        return checkpoints.restore(step, build(config).shapes)


class Starts(SilentReporter):
    """Notes where a run starts."""

    def on_start(self, info):
        self.start = info.start_step


def go_on_and_compare(config, directory, fresh, same, *, start):
    """Resumes a run that broke off, and compares it with one that did not, bit by bit."""
    starts = Starts()
    train(config, directory, reporter=starts, stop_after=start + 50)
    assert starts.start == start
    train(config, fresh, reporter=SilentReporter(), stop_after=start + 50)
    actual, expected = (state_at(config, where, start + 50) for where in (directory, fresh))
    same(actual.state, expected.state)
    assert actual.data == expected.data
    rows = [
        [(row["step"], row.get("train/loss"), row.get("eval/loss")) for row in read_rows(file)]
        for file in (directory / "metrics.jsonl", fresh / "metrics.jsonl")
    ]
    assert rows[0] == rows[1]


def test_a_killed_run_loses_only_the_steps_since_its_last_checkpoint(
    tiny, start, config_file, tmp_path, same
):
    config, directory = endless(tiny), tmp_path / "run"
    process = start(*TRAIN, config_file(config), "--directory", directory)
    # Some steps after a checkpoint, which are those to lose.
    process.wait_for(lambda: logged_step(directory) >= max(saved_steps(directory) or [999]) + 20)
    code, _, _ = process.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    saved = saved_steps(directory)
    assert saved
    assert saved[-1] <= logged_step(directory)
    go_on_and_compare(config, directory, tmp_path / "fresh", same, start=saved[-1])


# Trains like experiments.train, but the checkpoint of step 100 never becomes whole.
SLOW_WRITE = """
    import sys, time
    from orbax.checkpoint._src.path import atomicity
    from experiments import cli, train

    finalize = atomicity.AtomicRenameTemporaryPath.finalize

    async def stuck(self, *args, **kwargs):
        if str(self.get_final()).endswith("/checkpoints/100"):
            time.sleep(1000)
        return await finalize(self, *args, **kwargs)

    atomicity.AtomicRenameTemporaryPath.finalize = stuck
    sys.exit(cli.run(train.main, train.make_parser()))
"""


def test_a_run_killed_while_it_writes_a_checkpoint_has_the_one_before(
    tiny, start, config_file, tmp_path, same
):
    config, directory = endless(tiny), tmp_path / "run"
    script = tmp_path / "slow_write.py"
    script.write_text(textwrap.dedent(SLOW_WRITE))
    process = start(script, "--config", config_file(config), "--directory", directory)
    half = directory / "checkpoints" / "100.orbax-checkpoint-tmp"
    process.wait_for(lambda: any(half.glob("state*/**/ocdbt.process_0/d/*")))
    process.end(signal.SIGKILL)
    assert half.exists()
    assert saved_steps(directory) == [50]
    go_on_and_compare(config, directory, tmp_path / "fresh", same, start=50)
    assert not half.exists()
    assert saved_steps(directory) == [50, 100]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_exits_with_one_line(
    tiny, start, config_file, tmp_path, same, signum
):
    config, directory = endless(tiny), tmp_path / "run"
    process = start(*TRAIN, config_file(config), "--directory", directory)
    process.wait_for(lambda: logged_step(directory) >= 20)
    code, output, errors = process.end(signum)
    step = saved_steps(directory)[-1]
    assert code == 128 + signum
    assert errors.splitlines() == [
        f"stopped by {signum.name} at step {step}, which is saved; "
        "the same command goes on from there"
    ]
    assert f"stopped at step {step}" in output
    assert json.loads((directory / "summary.json").read_text())["completed"] is False
    if signum == signal.SIGTERM:
        return
    # The state is that of a run that was never interrupted.
    train(config, tmp_path / "fresh", reporter=SilentReporter(), stop_after=step)
    actual, expected = (state_at(config, d, step) for d in (directory, tmp_path / "fresh"))
    same(actual.state, expected.state)
    assert actual.data == expected.data


# Trains like experiments.train, but each evaluation takes forever.
SLOW_EVALUATION = """
    import sys, time
    from cumulant_jax.training import loop
    from cumulant_jax.training.experiment import Experiment
    from experiments import cli, train

    def stuck(*args, **kwargs):
        print("evaluating", flush=True)
        deadline = time.monotonic() + 1000
        while time.monotonic() < deadline:
            time.sleep(0.1)

    Experiment.evaluate = stuck
    sys.exit(cli.run(train.main, train.make_parser()))
"""


def test_a_second_ctrl_c_quits_at_once(tiny, start, config_file, tmp_path):
    config, directory = endless(tiny), tmp_path / "run"
    script = tmp_path / "slow_evaluation.py"
    script.write_text(textwrap.dedent(SLOW_EVALUATION))
    process = start(script, "--config", config_file(config), "--directory", directory)
    process.wait_for(lambda: logged_step(directory) >= 50)
    process.signal(signal.SIGINT)
    with pytest.raises(AssertionError, match="nothing happened"):
        process.wait_for(lambda: False, seconds=0.5)
    code, _, errors = process.end(signal.SIGINT)
    assert code == 130
    assert errors == "quit at once on a second SIGINT\n"


DEVICES = """
    import json, sys
    import jax
    from cumulant_jax.training import SilentReporter, build, load_config, train

    config = load_config(sys.argv[1])
    experiment = build(config)
    program = experiment.compile_train_step().call.as_text()
    train(config, sys.argv[2], reporter=SilentReporter())
    print(json.dumps([jax.device_count(), experiment.mesh.size, "all-reduce" in program]))
"""


def test_eight_devices_give_the_results_of_one(tiny, start, config_file, tmp_path, monkeypatch):
    config = tiny(
        total="6 steps",
        mixing__mixup=0.4,
        gradient_accumulation=2,
        options={"dropout": 0.1},
        eval_batch_size=50,
    )
    script = tmp_path / "devices.py"
    script.write_text(textwrap.dedent(DEVICES))
    processes = {}
    flags = os.environ.get("XLA_FLAGS", "")
    for count in (1, 8):
        count_flag = f"--xla_force_host_platform_device_count={count}"
        monkeypatch.setenv("XLA_FLAGS", f"{flags} {count_flag}")
        processes[count] = start(script, config_file(config), tmp_path / str(count))
    for count, process in processes.items():
        code, output, errors = process.end()
        assert code == 0, errors
        assert json.loads(output.splitlines()[-1]) == [count, count, count > 1]
    one, eight = (read_rows(tmp_path / count / "metrics.jsonl") for count in ("1", "8"))
    assert [row["step"] for row in one] == [3, 6, 6]
    for row, other in zip(one, eight, strict=True):
        times = {name for name in row if name.endswith(("_seconds", "_per_second", "_ms"))}
        for name in set(row) - times:
            assert other[name] == pytest.approx(row[name], rel=2e-3), (row["step"], name)
