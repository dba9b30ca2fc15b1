import dataclasses
import json

import pytest

from cumulant_jax.training import RunDirectory, Summary

SUMMARY = Summary(
    steps=3,
    completed=True,
    final_metrics={"loss": 0.5},
    best_metrics={"loss": 0.5},
    best_step=3,
    num_parameters=10,
    images_per_second=1.0,
    step_time_ms=2.0,
    step_memory_bytes=None,
    compile_seconds=0.1,
    wall_seconds=3.0,
)


def test_config_and_summary_are_read_as_they_were_written(tiny, tmp_path):
    run = RunDirectory(tmp_path / "a" / "b")
    config = tiny(data__augment=("flip",))
    run.check(config)
    assert not run.path.exists()
    with run.lock():
        run.write_config(config)
        assert run.summary() is None
        run.write_summary(SUMMARY)
    assert RunDirectory(run.path).config() == config
    assert RunDirectory(run.path).summary() == SUMMARY
    assert json.loads((run.path / "config.json").read_text())["batch_size"] == 32
    assert dataclasses.asdict(SUMMARY) == json.loads((run.path / "summary.json").read_text())


def test_another_config_is_refused_with_the_differences_and_nothing_is_touched(tiny, tmp_path):
    run = RunDirectory(tmp_path)
    with run.lock():
        run.write_config(tiny())
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="another config") as caught:
        run.check(tiny(batch_size=64, model__attention="linear", optimizer__b2=0.95))
    for change in (
        "batch_size: 32 → 64",
        "model.attention: softmax → linear",
        "optimizer.b2: 0.999 → 0.95",
    ):
        assert change in str(caught.value)
    assert str(caught.value).count("→") == 3
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_one_process_at_a_time(tmp_path):
    with (
        RunDirectory(tmp_path).lock(),
        pytest.raises(ValueError, match="another process is training"),
        RunDirectory(tmp_path).lock(),
    ):
        pass
    with RunDirectory(tmp_path).lock():
        pass


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run in"):
        RunDirectory(tmp_path).config()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        RunDirectory(tmp_path / "file").check(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl", "summary.json"])
def test_files_of_nobody_are_not_overwritten(tiny, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name} but no config.json"):
        RunDirectory(tmp_path).check(tiny())


def test_checkpoints_without_a_config_are_refused(tiny, tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds checkpoints but no config"):
        RunDirectory(tmp_path).check(tiny())


BROKEN = (b"{", b"[1]", b"\xff\xfe", b'{"stepps": 3}', b'"text"')


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("name", ["config", "summary"])
def test_a_broken_file_is_named_in_one_line(tmp_path, name, content):
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}\.json cannot be used: ") as caught:
        getattr(RunDirectory(tmp_path), name)()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"steps": "3"}, {"completed": 1}, {"final_metrics": {"a": "b"}}]
)
def test_a_summary_of_wrong_types_is_refused(tmp_path, change):
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY.to_dict(), **change}))
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got"):
        RunDirectory(tmp_path).summary()
