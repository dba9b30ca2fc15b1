import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.training import MixingConfig, build
from cumulant_jax.training.mesh import batch_sharding, to_devices


def run(config, steps=3, *, donate=True):
    experiment = build(config)
    state, step = experiment.create_state(), experiment.train_step(donate=donate)
    batches, states, metrics = experiment.train_iterator(), [], []
    states.append(jax.device_get(state))
    for _ in range(steps):
        batch = to_devices(next(batches), batch_sharding(experiment.mesh))
        state, values = step(state, batch)
        states.append(jax.device_get(state))
        metrics.append({name: float(value) for name, value in values.items()})
    batches.close()
    return experiment, states, metrics


def named(tree):
    return {jax.tree_util.keystr(p): v for p, v in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_gradient_accumulation_equals_the_full_batch(tiny):
    mixing = MixingConfig(mixup=0.4, cutmix=1.0, label_smoothing=0.1)
    config = tiny().replace(mixing=mixing.__dict__)
    _, whole, whole_metrics = run(config)
    _, split, split_metrics = run(config.replace(gradient_accumulation=4))
    for one, other in zip(whole_metrics, split_metrics, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=2e-4), name
    # Adam's first steps are signs of the gradient; compare what they are made from.
    for name, moment in named(whole[1].opt_state).items():
        np.testing.assert_allclose(
            named(split[1].opt_state)[name], moment, rtol=1e-3, atol=1e-6, err_msg=name
        )


def test_the_metrics_are_those_of_the_model_before_the_update(tiny):
    experiment, states, metrics = run(tiny(), steps=2)
    batch = next(experiment.train_iterator())
    info = experiment.task.dataset.info
    images = (batch["image"] / 255.0 - np.asarray(info.mean)) / np.asarray(info.std)

    def loss(params):
        model = experiment.task.model(params, states[0].model_state)
        logits = model(jnp.asarray(images, jnp.float32))
        picked = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked), logits

    (expected, logits), grads = jax.value_and_grad(loss, has_aux=True)(states[0].params)
    norm = np.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(grads)))
    assert metrics[0]["loss"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics[0]["accuracy"] == pytest.approx(np.mean(np.argmax(logits, 1) == batch["label"]))
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    # Warm-up over 2 steps to 3e-3.
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1.5e-3, 3e-3])


def test_the_moving_average_follows_its_recursion(tiny):
    _, states, _ = run(tiny(ema_decay=0.3), steps=4)
    expected = {name: v.astype(np.float64) for name, v in named(states[0].params).items()}
    for step, state in enumerate(states[1:]):
        decay = min(0.3, (1 + step) / (10 + step))
        for name, value in named(state.params).items():
            expected[name] = decay * expected[name] + (1 - decay) * value
    for name, value in named(states[-1].ema).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert states[-1].eval_params is states[-1].ema


def test_bfloat16_computes_in_it_and_keeps_float32(tiny):
    experiment, states, metrics = run(tiny(model__dtype="bfloat16", ema_decay=0.9), steps=1)
    for part in (states[1].params, states[1].ema, states[1].opt_state[1][0].mu):
        assert {leaf.dtype for leaf in jax.tree.leaves(part)} == {np.dtype(np.float32)}
    program = experiment.train_step().lower(experiment.shapes, experiment.task.batch_shapes(32))
    assert "bf16" in program.as_text()
    values = jax.eval_shape(
        lambda state, batch: experiment.train_step()(state, batch)[1],
        experiment.shapes,
        experiment.task.batch_shapes(32),
    )
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}
    _, _, exact = run(tiny(), steps=1)
    assert metrics[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.02)
    assert metrics[0]["loss"] != exact[0]["loss"]


def test_the_step_takes_the_states_memory(tiny):
    experiment = build(tiny())
    state = experiment.create_state()
    batch = to_devices(next(experiment.train_iterator()), batch_sharding(experiment.mesh))
    new, _ = experiment.train_step()(state, batch)
    # The key never changes, and so may be passed on; every other leaf is new.
    old = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state)]
    assert all(leaf.is_deleted() for leaf in old)
    assert int(new.step) == 1


def test_dropout_differs_from_step_to_step_and_not_from_run_to_run(tiny, same):
    config = tiny(options={"dropout": 0.5})
    experiment, states, _ = run(config, steps=2, donate=False)
    _, again, _ = run(config, steps=2, donate=False)
    same(states[-1], again[-1])
    # The same batch and parameters at another step: only the drops differ.
    step = experiment.train_step(donate=False)
    batch = to_devices(next(experiment.train_iterator()), batch_sharding(experiment.mesh))
    state = experiment.create_state()
    losses = [float(step(state.replace(step=jnp.int32(s)), batch)[1]["loss"]) for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
