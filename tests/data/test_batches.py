"""Training stream and evaluation pass: order, restart, shards, padding."""

import json
import subprocess
import sys
import threading

import grain
import numpy as np
import pytest
from etils import epath

from cumulant_jax.data import (
    DataConfig,
    augment,
    batches,
    eval_batches,
    load,
    random_order,
    train_iterator,
)
from cumulant_jax.data.source import ArraySource


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    return {key: np.stack([batch[key] for batch in batches]) for key in batches[0]}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@pytest.fixture(scope="module")
def digits():
    return load(DataConfig(name="digits", augment=("flip", "crop")))


@pytest.fixture(scope="module")
def numbered():
    """A data set in which the label of an example is its number, so that the order shows."""
    dataset = load(DataConfig(name="digits"))
    count = 53
    images = np.broadcast_to(
        np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1), (count, 4, 4, 1)
    )
    source = ArraySource(images, np.arange(count, dtype=np.int32))
    dataset._splits._opened.update({"train": source, "test": source})
    return dataset


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("seed", [0, 12345])
def test_every_epoch_is_a_permutation(numbered, batch_size, seed):
    steps = -(-3 * 53 // batch_size)
    stream = take(train_iterator(numbered, batch_size=batch_size, seed=seed), steps)
    order = stream["label"].ravel()
    epochs = order[: 3 * 53].reshape(3, 53)
    for epoch in epochs:
        assert sorted(epoch) == list(range(53))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # Images travel with their labels.
    np.testing.assert_array_equal(stream["image"][..., 0, 0, 0].ravel(), order)


def test_types_and_shapes(digits):
    batch = next(train_iterator(digits, batch_size=5, seed=0))
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32
    assert batch["image"].shape == (5, 8, 8, 1)


def test_deterministic_and_different_seeds_differ(digits):
    first = take(train_iterator(digits, batch_size=32, seed=1), 50)
    assert_same(first, take(train_iterator(digits, batch_size=32, seed=1), 50))
    other = take(train_iterator(digits, batch_size=32, seed=2), 50)
    assert (first["label"] != other["label"]).mean() > 0.5


def test_prefetch_and_start_step_do_not_change_the_stream(digits):
    whole = take(train_iterator(digits, batch_size=48, seed=3), 70)
    deep = load(DataConfig(name="digits", augment=("flip", "crop"), prefetch=50))
    assert_same(whole, take(train_iterator(deep, batch_size=48, seed=3), 70))
    late = take(train_iterator(digits, batch_size=48, seed=3, start_step=61), 9)
    assert_same({key: value[61:] for key, value in whole.items()}, late)


def test_augmentation_differs_between_epochs(digits):
    # One batch is one epoch: every image comes once in each, in another window or mirrored.
    plain = load(DataConfig(name="digits"))
    augmented = take(train_iterator(digits, batch_size=1437, seed=0), 2)
    stored = take(train_iterator(plain, batch_size=1437, seed=0), 2)
    np.testing.assert_array_equal(augmented["label"], stored["label"])
    orders = [np.lexsort(epoch.reshape(1437, -1).T) for epoch in stored["image"]]
    first, second = (epoch[order] for epoch, order in zip(augmented["image"], orders, strict=True))
    changed = (first != second).any(axis=(1, 2, 3)).mean()
    # Same flip (1/2) and same window (1/9) leave 1 of 18 unchanged.
    assert 0.9 < changed < 0.98


def test_every_step_and_augmentation_has_its_own_random_words(digits):
    augmented = take(train_iterator(digits, batch_size=40, seed=8), 6)["image"]
    stored = take(train_iterator(load(DataConfig(name="digits")), batch_size=40, seed=8), 6)[
        "image"
    ]
    for step in range(6):
        flips = random_order.augment_words(8, 0, step, 40, 1)
        crops = random_order.augment_words(8, 1, step, 40, 2)
        flipped = augment.Flip()(stored[step].copy(), flips)
        expected = augment.Crop()(flipped, crops)
        np.testing.assert_array_equal(augmented[step], expected, err_msg=f"step {step}")


RESUME = """
import hashlib, json, sys
from cumulant_jax.data import DataConfig, load, train_iterator
dataset = load(DataConfig(name="digits", augment=("flip", "crop")))
iterator = train_iterator(dataset, batch_size=64, seed=9)
iterator.set_state(json.loads(sys.argv[1]))
digest = hashlib.sha256()
for _ in range(30):
    batch = next(iterator)
    digest.update(batch["image"].tobytes() + batch["label"].tobytes())
print(digest.hexdigest(), json.dumps(iterator.get_state()))
"""


def test_resume_in_a_new_process_equals_the_uninterrupted_run(digits):
    import hashlib

    iterator = train_iterator(digits, batch_size=64, seed=9)
    take(iterator, 33)  # in the middle of the second epoch
    state = json.dumps(iterator.get_state())
    rest = take(iterator, 30)
    digest = hashlib.sha256()
    for image, label in zip(rest["image"], rest["label"], strict=True):
        digest.update(image.tobytes() + label.tobytes())
    command = [sys.executable, "-c", RESUME, state]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.split(maxsplit=1)[0] == digest.hexdigest()
    assert json.loads(out.split(maxsplit=1)[1]) == iterator.get_state()


def test_set_state_goes_back_and_forth(digits):
    iterator = train_iterator(digits, batch_size=16, seed=0)
    start = iterator.get_state()
    first = take(iterator, 5)
    middle = iterator.get_state()
    second = take(iterator, 5)
    iterator.set_state(middle)
    assert_same(take(iterator, 5), second)
    iterator.set_state(start)
    assert_same(take(iterator, 5), first)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 1}, "seed"), ({"batch_size": 8}, "batch_size")],
)
def test_state_of_another_stream_is_refused(digits, change, name):
    arguments = {"batch_size": 16, "seed": 0}
    state = train_iterator(digits, **(arguments | change)).get_state()
    with pytest.raises(ValueError, match=f"state: {name} is {change[name]}, but this iterator has"):
        train_iterator(digits, **arguments).set_state(state)


@pytest.mark.parametrize("state", [None, [], 5, {}, {"step": None}, {"step": -1}, {"step": True}])
def test_what_is_no_state_is_refused(digits, state):
    iterator = train_iterator(digits, batch_size=16, seed=0)
    if isinstance(state, dict):
        state = {**iterator.get_state(), "step": ..., **state}
    with pytest.raises(ValueError, match=r"state must be a dict from get_state\(\) with a step"):
        iterator.set_state(state)
    iterator.close()


def test_grains_checkpoint_handler_restores_the_stream(digits, tmp_path, monkeypatch):
    """It asks the stream to read ahead, before the first batch is asked for."""
    read = threading.Event()
    get = batches._TrainBatches.__getitem__

    def noted(self, step):
        read.set()
        return get(self, step)

    handler = grain.checkpoint.CheckpointHandler()
    first, second = (train_iterator(digits, batch_size=16, seed=0) for _ in range(2))
    next(first)
    handler.save(epath.Path(tmp_path), first)
    expected = next(first)
    first.close()
    monkeypatch.setattr(batches._TrainBatches, "__getitem__", noted)
    restored = handler.restore(epath.Path(tmp_path), second)
    assert read.wait(timeout=20)
    np.testing.assert_array_equal(next(restored)["image"], expected["image"])
    second.close()


def test_state_of_another_augmentation_is_refused(digits):
    plain = train_iterator(load(DataConfig(name="digits")), batch_size=16, seed=0)
    with pytest.raises(ValueError, match=r"state: augment is \[\], but this iterator has"):
        train_iterator(digits, batch_size=16, seed=0).set_state(plain.get_state())


def test_state_of_another_data_set_is_refused(digits):
    state = train_iterator(digits, batch_size=16, seed=0).get_state() | {"dataset": "cifar10"}
    with pytest.raises(ValueError, match="state: dataset is 'cifar10'"):
        train_iterator(digits, batch_size=16, seed=0).set_state(state)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_partition_the_global_batch(digits, count):
    whole = take(train_iterator(digits, batch_size=66, seed=5), 40)
    parts = [
        take(
            train_iterator(digits, batch_size=66, seed=5, process_index=i, process_count=count), 40
        )
        for i in range(count)
    ]
    assert_same(whole, {key: np.concatenate([p[key] for p in parts], axis=1) for key in whole})


def test_a_resume_may_change_the_number_of_processes(digits):
    iterator = train_iterator(digits, batch_size=66, seed=5, process_index=1, process_count=2)
    take(iterator, 10)
    alone = train_iterator(digits, batch_size=66, seed=5)
    alone.set_state(iterator.get_state())
    whole = take(train_iterator(digits, batch_size=66, seed=5), 13)
    assert_same(take(alone, 3), {key: value[10:] for key, value in whole.items()})


def test_batches_are_the_callers_own(numbered):
    source = numbered.source("test")
    before = source.images.copy()
    for batch in eval_batches(numbered, batch_size=10):
        assert not np.shares_memory(batch["image"], source.images)
        batch["image"][:] = 255
    np.testing.assert_array_equal(source.images, before)


@pytest.mark.parametrize("batch_size", [6, 12, 66, 600])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_eval_counts_every_example_once(numbered, batch_size, count):
    parts = [
        list(eval_batches(numbered, batch_size=batch_size, process_index=i, process_count=count))
        for i in range(count)
    ]
    assert {len(part) for part in parts} == {-(-53 // batch_size)}
    check_eval([batch for part in parts for batch in part], batch_size // count)


@pytest.mark.parametrize("batch_size", [1, 7, 53, 64, 1000])
def test_eval_on_one_process(numbered, batch_size):
    batches = eval_batches(numbered, batch_size=batch_size)
    seen = list(batches)
    assert len(batches) == len(seen) == -(-53 // batch_size)
    check_eval(seen, batch_size)
    assert_same(seen[-1], list(batches)[-1])


def check_eval(batches, rows):
    labels, weights = [], []
    for batch in batches:
        assert batch["image"].shape == (rows, 4, 4, 1)
        assert batch["weight"].dtype == np.float32
        assert batch["label"].dtype == np.int32
        real = batch["weight"] == 1
        assert ((batch["weight"] == 0) | real).all()
        np.testing.assert_array_equal(batch["image"][real][:, 0, 0, 0], batch["label"][real])
        assert (batch["image"][~real] == 0).all()
        assert (batch["label"][~real] == 0).all()
        labels.append(batch["label"])
        weights.append(batch["weight"])
    counts = np.bincount(np.concatenate(labels), np.concatenate(weights), minlength=53)
    assert counts.tolist() == [1] * 53


def test_eval_of_a_named_split(digits):
    batches = eval_batches(digits, batch_size=500, split="train")
    assert sum(batch["weight"].sum() for batch in batches) == 1437


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.0}, "batch_size must be an integer of at least 1, got 2.0"),
        ({"process_count": 3}, "batch_size=16 must be a multiple of process_count=3"),
        ({"process_index": 2, "process_count": 2}, "process_index must be below process_count=2"),
    ],
)
def test_bad_arguments(digits, arguments, message):
    for function, more in ((train_iterator, {"seed": 0}), (eval_batches, {})):
        with pytest.raises(ValueError, match=message):
            function(digits, **({"batch_size": 16} | more | arguments))


def test_bad_start_and_seed(digits):
    with pytest.raises(ValueError, match="start_step must be a non-negative integer, got -1"):
        train_iterator(digits, batch_size=1, seed=0, start_step=-1)
    with pytest.raises(ValueError, match="seed must be in"):
        train_iterator(digits, batch_size=1, seed=-1)


def test_a_closed_iterator_stops(digits):
    iterator = train_iterator(digits, batch_size=1, seed=0)
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_the_digits_need_no_tfds_and_the_root_package_no_data():
    code = """
import sys
import cumulant_jax
assert not {"grain", "tensorflow_datasets", "sklearn"} & set(sys.modules), "root imports data"
import cumulant_jax.data as data
next(data.train_iterator(data.load(), batch_size=4, seed=0))
assert "tensorflow_datasets" not in sys.modules and "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
