"""Tasks: what the training loop can learn."""

from cumulant_jax.training.tasks.classification import ClassificationTask
from cumulant_jax.training.tasks.registry import TASKS, create_task
from cumulant_jax.training.tasks.task import Batch, Metrics, Task

__all__ = ["TASKS", "Batch", "ClassificationTask", "Metrics", "Task", "create_task"]
