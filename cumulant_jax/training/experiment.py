"""The parts of an experiment, put together from its config: for the loop and for measurements."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from cumulant_jax.costs.chips import chip_of
from cumulant_jax.costs.flops import count_flops
from cumulant_jax.kernels import Device, assume_device
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.evaluation import evaluate
from cumulant_jax.training.mesh import batch_divisor, batch_sharding, data_share, make_mesh
from cumulant_jax.training.optimizer import make_optimizer, make_schedule
from cumulant_jax.training.plan import Plan
from cumulant_jax.training.state import TrainState, create_state, num_parameters, state_shapes
from cumulant_jax.training.step import make_eval_step, make_train_step
from cumulant_jax.training.tasks.registry import create_task
from cumulant_jax.training.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled training step.

    Attributes:
      call: (state, batch) → (state, metrics); it takes the state's memory.
      memory_bytes: arguments, temporaries and the outputs that are no arguments' memory, on one
        device; None where XLA has no analysis.
      seconds: the time it took to compile.
    """

    call: Any
    memory_bytes: int | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of an experiment; made by `build`.

    Attributes:
      config: the config.
      task: data, model and loss.
      mesh: the device mesh.
      plan: durations in steps.
      schedule: the learning rate by step.
      optimizer: the optimizer.
      shapes: shapes, types and shardings of the state.
    """

    config: ExperimentConfig
    task: Task
    mesh: Mesh
    plan: Plan
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    shapes: TrainState

    @property
    def num_parameters(self) -> int:
        """Counts the trained parameters."""
        return num_parameters(self.shapes.params)

    def create_state(self) -> TrainState:
        """Initialises the training state on the devices."""
        return create_state(
            self.task,
            self.optimizer,
            self.mesh,
            seed=self.config.seed,
            ema_decay=self.config.ema_decay,
        )

    def train_iterator(self) -> Any:
        """Returns the endless Grain iterator of this process's share of the batches."""
        share = data_share(self.mesh)
        return self.task.train_iterator(
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            process_index=share.index,
            process_count=share.count,
        )

    def train_step(self, *, donate: bool = True) -> Any:
        """Returns the jitted step (state, batch) → (state, metrics), not compiled yet."""
        return make_train_step(
            self.task,
            self.optimizer,
            self.mesh,
            self.shapes,
            schedule=self.schedule,
            gradient_accumulation=self.config.gradient_accumulation,
            ema_decay=self.config.ema_decay,
            donate=donate,
        )

    def trace_train_step(self) -> Any:
        """Traces the step: what is wrong with the model shows, and nothing is compiled."""
        sharding = batch_sharding(self.mesh)
        batch = {
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
            for name, shape in self.task.batch_shapes(self.config.batch_size).items()
        }
        return self.train_step().trace(self.shapes, batch)

    def compile_train_step(self, traced: Any = None) -> CompiledStep:
        """Compiles the step, without running it.

        Args:
          traced: from `trace_train_step`, to save doing it again.
        """
        began = time.perf_counter()
        compiled = (traced or self.trace_train_step()).lower().compile()
        memory = compiled.memory_analysis()
        size = memory and (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        return CompiledStep(compiled, size or None, time.perf_counter() - began)

    def step_flops(self) -> int:
        """Counts the FLOPs of a step in products, over all devices, in the forms that XLA runs."""
        shapes = self.task.batch_shapes(self.config.batch_size)
        with assume_device(Device("cpu")):
            return count_flops(self.train_step(donate=False), self.shapes, shapes)

    def peak_flops(self) -> float | None:
        """The published FLOPs per second of all devices of the mesh; None for unknown ones."""
        chip = chip_of(self.mesh.devices.flat[0].device_kind)
        return chip and self.mesh.size * chip.matmul_flops[self.config.model.dtype]

    def eval_step(self) -> Any:
        """Returns the jitted step (params, model_state, batch) → weighted sums."""
        return make_eval_step(self.task, self.mesh, self.shapes)

    def evaluate(
        self, eval_step: Any, state: TrainState, *, batch_size: int | None = None, ema: bool = True
    ) -> dict[str, float]:
        """Evaluates a state on the whole evaluation set.

        Args:
          eval_step: from `eval_step`; passed in, so that it is compiled once.
          state: the state.
          batch_size: that of the config by default; the result does not depend on it.
          ema: whether to evaluate the moving average, where there is one.
        """
        return evaluate(
            eval_step,
            state.eval_params if ema else state.params,
            state.model_state,
            self.task,
            self.mesh,
            batch_size=batch_size or self.config.eval_batch_size or self.config.batch_size,
        )


def build(
    config: ExperimentConfig,
    *,
    devices: Sequence[Any] | None = None,
    task: Task | None = None,
) -> Experiment:
    """Puts an experiment together: opens the data, builds the model's structure and the mesh.

    No parameters are made and nothing is compiled or written.

    Args:
      config: the config.
      devices: the devices to use, by default all of them; they may be those of a topology that is
        compiled for and not there.
      task: what is learned, by default `create_task(config)`, which opens the data.

    Raises:
      ValueError: for a name or a value in the config that cannot be used.
      FileNotFoundError: if the data set is not prepared.

    >>> experiment = build(ExperimentConfig(total="2 epochs", batch_size=100))
    >>> experiment.plan.total, experiment.task.label
    (29, 'vit_nano2 softmax on digits')
    """
    mesh = make_mesh(config.mesh, devices=devices)
    divisor = batch_divisor(mesh) * config.gradient_accumulation
    if config.batch_size % divisor:
        raise ValueError(
            f"config key batch_size: got {config.batch_size}, expected a multiple of {divisor}: "
            f"{batch_divisor(mesh)} devices times {config.gradient_accumulation} micro-batches."
        )
    task = task or create_task(config)
    plan = Plan.of(config, num_train=task.num_train)
    schedule = make_schedule(config.optimizer, total_steps=plan.total, warmup_steps=plan.warmup)
    optimizer = make_optimizer(config.optimizer, schedule)
    shapes = state_shapes(task, optimizer, mesh, ema_decay=config.ema_decay)
    return Experiment(config, task, mesh, plan, schedule, optimizer, shapes)
