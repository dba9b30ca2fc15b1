"""The table of tasks."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cumulant_jax.naming import unknown_name
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.tasks.classification import ClassificationTask
from cumulant_jax.training.tasks.task import Task

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType({"classification": ClassificationTask})


def create_task(config: ExperimentConfig, *, info: Any = None) -> Task:
    """Makes the task of a config, which loads its data and checks its model.

    Args:
      config: the config.
      info: the description of its data set, for compiling without the data: it is not loaded then,
        and cannot be iterated over.

    Raises:
      ValueError: for an unknown task, model, attention kind or data set.
      FileNotFoundError: if the data set is not prepared.
    """
    if config.task not in TASKS:
        raise ValueError(f"config key task: {unknown_name('task', config.task, TASKS)}")
    return TASKS[config.task](config, **({} if info is None else {"info": info}))
