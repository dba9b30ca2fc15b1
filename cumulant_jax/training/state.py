"""The training state: one pytree that a checkpoint holds whole."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from cumulant_jax.training.mesh import state_shardings
from cumulant_jax.training.tasks.task import Task

Tree = Mapping[Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that changes from step to step.

    Attributes:
      step: int32 scalar, the number of steps done.
      params: the trained parameters as nested dicts, float32.
      model_state: the model's other variables (such as batch statistics) as nested dicts.
      opt_state: the optimizer's state.
      ema: the moving average of the parameters; None without one.
      rng: key data (uint32) of the run. It never changes: step s uses it folded with s, so the
        random numbers of a step do not depend on where the run was interrupted.
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: Any
    ema: Tree | None
    rng: jax.Array

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def eval_params(self) -> Tree:
        """The parameters to evaluate: the moving average where there is one."""
        return self.params if self.ema is None else self.ema


def create_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    seed: int = 0,
    ema_decay: float | None = None,
) -> TrainState:
    """Initialises the state, laid out on the mesh from the start.

    Args:
      task: initialises the model.
      optimizer: initialises its state.
      mesh: the device mesh; no parameter is ever whole on one device where a rule splits it.
      seed: of the parameters and of all random numbers of the training.
      ema_decay: whether there is a moving average.
    """
    init = _initializer(task, optimizer, ema_decay)
    key = jax.random.key(seed)
    shardings = state_shardings(jax.eval_shape(init, key), mesh)
    return jax.jit(init, out_shardings=shardings)(key)


def state_shapes(
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    ema_decay: float | None = None,
) -> TrainState:
    """Returns shapes, types and shardings of the state, for compiling and for restoring."""
    init = _initializer(task, optimizer, ema_decay)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh),
    )


def num_parameters(params: Tree) -> int:
    """Counts the parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _initializer(
    task: Task, optimizer: optax.GradientTransformation, ema_decay: float | None
) -> Callable[[jax.Array], TrainState]:
    def init(key: jax.Array) -> TrainState:
        params_key, run_key = jax.random.split(key)
        params, model_state = task.init(params_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            ema=None if ema_decay is None else jax.tree.map(jnp.copy, params),
            rng=jax.random.key_data(run_key),
        )

    return init
