"""The table of tasks."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cumulant_jax.naming import unknown_name
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.tasks.classification import ClassificationTask
from cumulant_jax.training.tasks.task import Task

TASKS: Mapping[str, Callable[[ExperimentConfig], Task]] = MappingProxyType(
    {"classification": ClassificationTask}
)


def create_task(config: ExperimentConfig) -> Task:
    """Makes the task of a config, which loads its data and checks its model.

    Raises:
      ValueError: for an unknown task, model, attention kind or data set.
      FileNotFoundError: if the data set is not prepared.
    """
    if config.task not in TASKS:
        raise ValueError(f"config key task: {unknown_name('task', config.task, TASKS)}")
    return TASKS[config.task](config)
