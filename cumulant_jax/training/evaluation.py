"""Evaluation: every example counts exactly once, whatever the batch size."""

from typing import Any

import jax
from jax.sharding import Mesh

from cumulant_jax.training.mesh import batch_divisor, batch_sharding, data_share, to_devices
from cumulant_jax.training.tasks.task import Task

# Batches that may wait for the device; bounds the memory that the inputs take.
_IN_FLIGHT = 4


def evaluate(
    eval_step: Any,
    params: Any,
    model_state: Any,
    task: Task,
    mesh: Mesh,
    *,
    batch_size: int,
) -> dict[str, float]:
    """Computes the mean of each metric over the evaluation set.

    The device sums each batch in float32, weighted 1 for examples and 0 for padding; the sums of
    the batches are added in float64 here.

    Args:
      eval_step: from `make_eval_step`.
      params: the parameters to evaluate.
      model_state: the model's other variables.
      task: supplies the batches.
      mesh: the device mesh.
      batch_size: rounded up to a multiple of the devices that share a batch.

    Returns:
      The mean of each of the task's metrics over all examples.
    """
    sharding = batch_sharding(mesh)
    batch_size = -(-batch_size // batch_divisor(mesh)) * batch_divisor(mesh)
    pending, totals = [], {}
    share = data_share(mesh)
    for batch in task.eval_batches(
        batch_size=batch_size, process_index=share.index, process_count=share.count
    ):
        pending.append(eval_step(params, model_state, to_devices(batch, sharding)))
        if len(pending) > _IN_FLIGHT:
            _add(totals, jax.device_get(pending.pop(0)))
    for sums in jax.device_get(pending):
        _add(totals, sums)
    weight = totals.pop("weight")
    return {name: total / weight for name, total in totals.items()}


def _add(totals: dict[str, float], sums: dict[str, Any]) -> None:
    for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + float(value)
