"""The training step: a pure function of state and batch, compiled once."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from cumulant_jax.training.mesh import batch_sharding, state_shardings
from cumulant_jax.training.state import TrainState
from cumulant_jax.training.tasks.task import Batch, Metrics, Task


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state: TrainState,
    *,
    schedule: optax.Schedule | None = None,
    gradient_accumulation: int = 1,
    ema_decay: float | None = None,
    donate: bool = True,
) -> Any:
    """Jits the step (state, batch) → (state, metrics).

    Args:
      task: prepares the batch and computes the loss.
      optimizer: updates the parameters.
      mesh: the device mesh.
      state: a state or its shapes; only its layout is used.
      schedule: the learning rate by step, for the metrics.
      gradient_accumulation: micro-batches that the batch is split into.
      ema_decay: decay of the moving average; None if the state has none.
      donate: whether the new state takes the old one's memory, which is then gone.

    Returns:
      The jitted function. Its metrics are float32 scalars: the task's, averaged over the batch,
      `grad_norm` (before clipping) and `learning_rate`.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        batch_key, loss_key = jax.random.split(key)
        batch = task.prepare(batch, rng=batch_key, train=True)
        grads, model_state, metrics = _gradients(
            task, state, batch, loss_key, gradient_accumulation
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {**metrics, "grad_norm": optax.tree.norm(grads)}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=_moving_average(state.ema, params, state.step, ema_decay),
        )
        return new_state, metrics

    layout = state_shardings(state, mesh)
    replicated = state_shardings(jax.ShapeDtypeStruct((), jnp.float32), mesh)
    return jax.jit(
        train_step,
        in_shardings=(layout, batch_sharding(mesh)),
        out_shardings=(layout, replicated),
        donate_argnums=(0,) if donate else (),
    )


def make_eval_step(task: Task, mesh: Mesh, state: TrainState) -> Any:
    """Jits (params, model_state, batch) → sums over the batch, weighted by `batch["weight"]`.

    Returns:
      The jitted function. Its float32 scalars are the weighted sums of the task's metrics and
      `weight`, the sum of the weights.
    """

    def eval_step(params: Any, model_state: Any, batch: Batch) -> Metrics:
        weight = batch["weight"].astype(jnp.float32)
        batch = task.prepare(batch, rng=None, train=False)
        _, values, _ = task.loss(params, model_state, batch, rng=None, train=False)
        # where, not a product alone: padding may hold anything, NaN too.
        sums = {k: jnp.sum(jnp.where(weight > 0, weight * v, 0.0)) for k, v in values.items()}
        return {**sums, "weight": jnp.sum(weight)}

    return jax.jit(
        eval_step,
        in_shardings=(
            state_shardings(state.params, mesh),
            state_shardings(state.model_state, mesh),
            batch_sharding(mesh),
        ),
        out_shardings=state_shardings(jax.ShapeDtypeStruct((), jnp.float32), mesh),
    )


def _gradients(
    task: Task, state: TrainState, batch: Batch, key: jax.Array, parts: int
) -> tuple[Any, Any, Metrics]:
    """Returns the mean gradient, the model's other state and the mean metrics."""

    def mean_loss(params, model_state, batch, key):
        losses, values, model_state = task.loss(params, model_state, batch, rng=key, train=True)
        return jnp.mean(losses), (model_state, jax.tree.map(jnp.mean, values))

    grad = jax.grad(mean_loss, has_aux=True)
    if parts == 1:
        grads, (model_state, metrics) = grad(state.params, state.model_state, batch, key)
        return grads, model_state, metrics

    def add_part(carry, part):
        sums, model_state = carry
        index, micro_batch = part
        part_key = jax.random.fold_in(key, index)
        grads, (model_state, values) = grad(state.params, model_state, micro_batch, part_key)
        return (jax.tree.map(jnp.add, sums, grads), model_state), values

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    micro_batches = jax.tree.map(lambda x: _split(x, parts), batch)
    (sums, model_state), values = jax.lax.scan(
        add_part, (zeros, state.model_state), (jnp.arange(parts), micro_batches)
    )
    grads = jax.tree.map(lambda x: x / parts, sums)
    return grads, model_state, jax.tree.map(jnp.mean, values)


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Splits [B, ...] into [parts, B/parts, ...], each part with rows from every device.

    Part i takes rows i, i + parts, …: a device's rows stay on it, so nothing is communicated.
    """
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def _moving_average(ema: Any, params: Any, step: jax.Array, decay: float | None) -> Any:
    if decay is None:
        return ema
    # Early on the average covers the steps there are, not mostly the initial parameters.
    done = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + done) / (10 + done))
    return jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)
