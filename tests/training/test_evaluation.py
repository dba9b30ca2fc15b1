import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.training import build
from cumulant_jax.training.mesh import batch_divisor


@pytest.fixture
def experiment(tiny):
    return build(tiny())


@pytest.mark.parametrize("batch_size", [1, 7, 64, 360, 1000])
def test_every_example_counts_once_whatever_the_batch_size(experiment, batch_size):
    state = experiment.create_state()
    scores = experiment.evaluate(experiment.eval_step(), state, batch_size=batch_size)

    dataset = experiment.task.dataset
    source = dataset.source("test")
    images, labels = source.gather(np.arange(len(source)))
    images = (images / 255.0 - np.asarray(dataset.info.mean)) / np.asarray(dataset.info.std)
    model = experiment.task.model(state.params, state.model_state)
    logits = np.asarray(model(jnp.asarray(images, jnp.float32)), np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    assert len(labels) == experiment.task.num_eval == 360
    assert scores["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == labels), abs=1e-9)
    assert scores["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert scores.keys() == {"loss", "accuracy"}


def test_padding_may_hold_anything(experiment):
    state, eval_step = experiment.create_state(), experiment.eval_step()
    size = 8 * batch_divisor(experiment.mesh)
    batch = next(iter(experiment.task.eval_batches(batch_size=size)))
    weight = np.where(np.arange(size) < size // 2, 1.0, 0.0).astype(np.float32)
    sums = jax.device_get(eval_step(state.params, state.model_state, {**batch, "weight": weight}))
    other = {**batch, "weight": weight, "label": np.where(weight, batch["label"], 9)}
    other["image"] = np.where(weight[:, None, None, None] > 0, batch["image"], 255).astype(np.uint8)
    changed = jax.device_get(eval_step(state.params, state.model_state, other))
    assert sums["weight"] == size // 2
    assert changed == sums


def test_an_evaluation_uses_plain_labels_and_no_dropout(tiny):
    plain, mixed = (
        build(tiny()),
        build(
            tiny(
                options={"dropout": 0.5},
                mixing__label_smoothing=0.2,
                mixing__mixup=1.0,
            )
        ),
    )
    state = plain.create_state()
    one = plain.evaluate(plain.eval_step(), state)
    assert mixed.evaluate(mixed.eval_step(), state) == pytest.approx(one, rel=1e-6)


def test_the_moving_average_is_evaluated_where_there_is_one(tiny):
    experiment = build(tiny(ema_decay=0.9))
    state = experiment.create_state()
    state = state.replace(ema=jax.tree.map(jnp.zeros_like, state.params))
    eval_step = experiment.eval_step()
    assert experiment.evaluate(eval_step, state)["loss"] == pytest.approx(np.log(10), rel=1e-5)
    raw = experiment.evaluate(eval_step, state, ema=False)
    assert raw["loss"] != pytest.approx(np.log(10), rel=1e-3)
