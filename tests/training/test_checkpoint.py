import shutil

import jax
import numpy as np
import pytest

from cumulant_jax.training import CheckpointError, Checkpoints, build
from cumulant_jax.training.mesh import batch_sharding, to_devices


@pytest.fixture
def experiment(tiny):
    return build(tiny(ema_decay=0.9))


def save(checkpoints, step, state, accuracy=None):
    metrics = {} if accuracy is None else {"accuracy": accuracy}
    checkpoints.save(
        step,
        state,
        data={"step": step},
        config={"seed": 0},
        progress={"seconds": 1.5 * step},
        metrics=metrics,
    )


def test_what_is_restored_is_what_was_saved_even_if_training_went_on(experiment, tmp_path, same):
    step, state = experiment.train_step(), experiment.create_state()
    batch = to_devices(next(experiment.train_iterator()), batch_sharding(experiment.mesh))
    expected = {}
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for number in (1, 2, 3):
            state, _ = step(state, batch)
            expected[number] = jax.tree.map(np.array, state)
            save(checkpoints, number, state)
            # The state's memory is taken by the next steps while the checkpoint is written.
            for _ in range(5):
                state, _ = step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 2, 3]
        for number, wanted in expected.items():
            restored = checkpoints.restore(number, experiment.shapes)
            same(restored.state, wanted)
            assert restored.data == {"step": number}
            assert restored.progress == {"seconds": 1.5 * number}
            shardings = jax.tree.map(lambda x: x.sharding, restored.state)
            assert shardings == jax.tree.map(lambda x: x.sharding, experiment.shapes)


def test_the_last_and_the_best_are_kept(experiment, tmp_path):
    state = experiment.create_state()
    scores = {1: 0.2, 2: 0.9, 3: 0.5, 4: None, 5: 0.6, 6: None, 7: 0.1, 8: None}
    with Checkpoints(tmp_path, keep_last=2, keep_best=2) as checkpoints:
        for step, accuracy in scores.items():
            save(checkpoints, step, state, accuracy)
        checkpoints.wait()
        assert checkpoints.steps == [2, 5, 7, 8]
        assert checkpoints.best_step == 2
        assert checkpoints.latest_step == 8


def test_the_best_may_be_the_smallest(experiment, tmp_path):
    state = experiment.create_state()
    with Checkpoints(tmp_path, keep_last=1, larger_is_better=False) as checkpoints:
        for step, accuracy in {1: 0.2, 2: 0.1, 3: 0.5, 4: 0.3}.items():
            save(checkpoints, step, state, accuracy)
        checkpoints.wait()
        assert checkpoints.steps == [2, 4]
        assert checkpoints.best_step == 2


def test_without_an_evaluation_there_is_no_best(experiment, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.latest_step, checkpoints.best_step, checkpoints.steps) == (
            None,
            None,
            [],
        )
        save(checkpoints, 3, experiment.create_state())
        checkpoints.wait()
        assert (checkpoints.latest_step, checkpoints.best_step) == (3, None)


def test_remains_of_an_interrupted_write_are_removed_and_never_restored(experiment, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 3, experiment.create_state(), 0.5)
    half = tmp_path / "4.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    (half / "state" / "part").write_text("half")
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.latest_step == 3
        assert half.exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [3]
        assert not half.exists()


def cut(path):
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        file.write_bytes(file.read_bytes()[:5])


@pytest.mark.parametrize(
    ("damage", "item"),
    [
        *((cut, item) for item in ("state", "data/metadata", "progress/metadata")),
        *((cut, item) for item in ("metrics/metrics",)),
        *((shutil.rmtree, item) for item in ("state", "data", "progress")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    experiment, tmp_path, damage, item, caplog
):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 7):
            save(checkpoints, step, experiment.create_state(), 0.5)
    damage(tmp_path / "7" / item)

    def restore():
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            checkpoints.restore(7, experiment.shapes)

    with pytest.raises(CheckpointError, match=r"/7' cannot be read .* from step 3\.$") as caught:
        restore()
    assert "\n" not in str(caught.value)
    # A run that goes on takes the one before it, and can save that step again.
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(experiment.shapes)
        assert restored.progress == {"seconds": 4.5}
        assert checkpoints.latest_step == 3
        warning = f"{str(tmp_path / '7')!r} cannot be read"
        assert [warning in record.getMessage() for record in caplog.records] == [True]
        assert "it is now 'damaged-7'" in caplog.text
        save(checkpoints, 7, experiment.create_state(), 0.5)
        checkpoints.wait()
        assert checkpoints.steps == [3, 7]
    assert (tmp_path / "damaged-7").is_dir()


def test_where_all_are_damaged_the_first_is_named(experiment, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 7):
            save(checkpoints, step, experiment.create_state(), 0.5)
    for step in (3, 7):
        cut(tmp_path / str(step) / "state")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"/3' cannot be read .* start from the beginning"),
    ):
        checkpoints.restore_latest(experiment.shapes)


def test_an_empty_directory_is_no_checkpoint(experiment, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 3, experiment.create_state(), 0.5)
    (tmp_path / "7").mkdir()
    for read_only in (True, False):
        with Checkpoints(tmp_path, read_only=read_only) as checkpoints:
            assert (checkpoints.steps, checkpoints.latest_step) == ([3], 3)
            assert checkpoints.best_step == 3
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 7, experiment.create_state(), 0.6)
        checkpoints.wait()
        assert checkpoints.steps == [3, 7]


@pytest.mark.parametrize("method", ["save", "wait_until_finished"])
def test_a_full_disk_is_one_line(experiment, tmp_path, monkeypatch, method):
    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nat some source line")

    def write(checkpoints):
        save(checkpoints, 3, experiment.create_state())
        checkpoints.wait()

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, method, full)
        with pytest.raises(CheckpointError, match=r"written to .*No space left on dev") as caught:
            write(checkpoints)
        monkeypatch.undo()
    assert "\n" not in str(caught.value)
