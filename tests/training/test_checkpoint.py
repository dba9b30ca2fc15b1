import jax
import numpy as np
import pytest

from cumulant_jax.training import Checkpoints, build
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
