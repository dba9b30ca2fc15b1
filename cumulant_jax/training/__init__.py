"""Training: configs, tasks, the step, the loop, checkpoints and run directories."""

from cumulant_jax.training.checkpoint import CheckpointError, Checkpoints
from cumulant_jax.training.compilation_cache import enable_compilation_cache
from cumulant_jax.training.config import (
    ExperimentConfig,
    MixingConfig,
    ModelConfig,
    OptimizerConfig,
    difference,
)
from cumulant_jax.training.config_dict import (
    config_arguments,
    default_config_dict,
    from_config_dict,
    load_config,
)
from cumulant_jax.training.durations import Duration
from cumulant_jax.training.experiment import Experiment, build
from cumulant_jax.training.loop import train
from cumulant_jax.training.mesh import make_mesh
from cumulant_jax.training.meter import NonFiniteError
from cumulant_jax.training.metrics_files import read_rows
from cumulant_jax.training.progress import (
    PlainLines,
    ProgressBar,
    Reporter,
    SilentReporter,
    default_reporter,
)
from cumulant_jax.training.run_directory import RunDirectory
from cumulant_jax.training.signals import Interrupted
from cumulant_jax.training.state import TrainState, create_state
from cumulant_jax.training.step import make_eval_step, make_train_step
from cumulant_jax.training.summary import RunInfo, Summary
from cumulant_jax.training.tasks import TASKS, Task, create_task
from cumulant_jax.training.weights import load_weights, save_weights

__all__ = [
    "TASKS",
    "CheckpointError",
    "Checkpoints",
    "Duration",
    "Experiment",
    "ExperimentConfig",
    "Interrupted",
    "MixingConfig",
    "ModelConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "PlainLines",
    "ProgressBar",
    "Reporter",
    "RunDirectory",
    "RunInfo",
    "SilentReporter",
    "Summary",
    "Task",
    "TrainState",
    "build",
    "config_arguments",
    "create_state",
    "create_task",
    "default_config_dict",
    "default_reporter",
    "difference",
    "enable_compilation_cache",
    "from_config_dict",
    "load_config",
    "load_weights",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "read_rows",
    "save_weights",
    "train",
]
