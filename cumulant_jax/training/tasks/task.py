"""The interface between the training loop and what is learned."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Task(Protocol):
    """What is learned: data, model, loss and metrics. The loop knows only this.

    Attributes:
      label: a short name of the model and its kind, for progress and tables.
      unit: what an example is: "images".
      metric_names: the names of the metrics that `loss` returns.
      main_metric: the metric by which evaluations are compared.
      larger_is_better: whether the best evaluation has the largest `main_metric`.
      num_train: examples in the training set.
      num_eval: examples in the evaluation set.
    """

    label: str
    unit: str
    metric_names: tuple[str, ...]
    main_metric: str
    larger_is_better: bool
    num_train: int
    num_eval: int

    def train_iterator(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Any:
        """Returns an endless Grain iterator of batches, a pure function of seed and step.

        Each of `process_count` readers gets its part of every batch.
        """
        ...

    def eval_batches(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> Iterable[Mapping[str, np.ndarray]]:
        """Returns batches that hold every example once, with a `weight` that is 0 for padding.

        Each of `process_count` readers gets its part of every batch, and equally many batches.
        """
        ...

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of a training batch, for compiling without data."""
        ...

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        """Returns new parameters and the model's other state, as nested dicts."""
        ...

    def prepare(self, batch: Batch, *, rng: jax.Array | None, train: bool) -> Batch:
        """Turns stored examples into model inputs and targets, on the device, batch-wise.

        What involves several examples (mixing) happens here, before a batch is split into
        micro-batches.
        """
        ...

    def loss(
        self, params: Any, model_state: Any, batch: Batch, *, rng: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Metrics, Any]:
        """Computes the loss of a prepared batch.

        Returns:
          The loss per example, float32 [B]; the metrics per example, each float32 [B]; and the
          model's new other state.
        """
        ...
