"""Image classification."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cumulant_jax import data, models
from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.mixing import mix, soft_labels
from cumulant_jax.training.tasks.task import Batch, Metrics


class ClassificationTask:
    """Learns the classes of images; see `Task` for what the methods are for.

    Images travel to the device as uint8 and are normalised there with the data set's mean and
    standard deviation per channel. In training, labels are smoothed and images mixed as the config
    says; an evaluation uses the plain cross-entropy.
    """

    unit: str = "images"
    metric_names: tuple[str, ...] = ("loss", "accuracy")
    main_metric: str = "accuracy"
    larger_is_better: bool = True

    def __init__(self, config: ExperimentConfig, *, info: Any = None):
        """Opens the data set and builds the model's structure, without its parameters.

        Args:
          config: the config.
          info: a DatasetInfo that stands in for the data set, which is not opened then.

        Raises:
          ValueError: for an unknown data set, model or option of it.
          FileNotFoundError: if the data set is not prepared.
        """
        self._config = config
        self._dataset: Any = data.load(config.data) if info is None else None
        info = self._dataset.info if info is None else info
        self._num_classes = info.num_classes
        self._image_shape = tuple(info.image_shape)
        self._mean = np.asarray(info.mean, np.float32) * 255
        self._std = np.asarray(info.std, np.float32) * 255
        self.num_train, self.num_eval = info.num_train, info.num_eval
        self.label = f"{config.model.name} {config.model.attention} on {info.name}"
        abstract = nnx.eval_shape(lambda: self._create(nnx.Rngs(0)))
        self._graphdef, _, _ = nnx.split(abstract, nnx.Param, ...)

    @property
    def dataset(self) -> Any:
        """The opened data set, with its `info`."""
        return self._dataset

    def train_iterator(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Any:
        """Returns the endless iterator of training batches."""
        return data.train_iterator(
            self._dataset,
            batch_size=batch_size,
            seed=seed,
            start_step=start_step,
            process_index=process_index,
            process_count=process_count,
        )

    def eval_batches(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> Iterable[Mapping[str, np.ndarray]]:
        """Returns the batches of the evaluation split."""
        return data.eval_batches(
            self._dataset,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
        )

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a training batch: uint8 images and int32 labels."""
        return {
            "image": jax.ShapeDtypeStruct((batch_size, *self._image_shape), jnp.uint8),
            "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        }

    def init(self, rng: jax.Array) -> tuple[Any, Any]:
        """Returns new parameters and other variables."""
        _, params, model_state = nnx.split(self._create(nnx.Rngs(rng)), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)

    def model(self, params: Any, model_state: Any) -> nnx.Module:
        """Returns the NNX module that holds these parameters."""
        return nnx.merge(self._graphdef, params, model_state)

    def prepare(self, batch: Batch, *, rng: jax.Array | None, train: bool) -> Batch:
        """Normalises the images, makes targets of the labels and, in training, mixes."""
        images = (batch["image"].astype(jnp.float32) - self._mean) / self._std
        mixing = self._config.mixing
        smoothing = mixing.label_smoothing if train else 0.0
        targets = soft_labels(batch["label"], num_classes=self._num_classes, smoothing=smoothing)
        if train and rng is not None:
            images, targets = mix(images, targets, rng=rng, config=mixing)
        return {"image": images, "target": targets}

    def loss(
        self, params: Any, model_state: Any, batch: Batch, *, rng: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Metrics, Any]:
        """Computes the cross-entropy, in float32, and whether the likeliest class is right.

        Args:
          params: the model's parameters.
          model_state: its other variables.
          batch: "image", float32 [B, H, W, C], and "target", float32 [B, classes].
          rng: a key for dropout; needed in training.
          train: whether dropout acts.
        """
        model: Any = self.model(params, model_state)
        logits = model(batch["image"], train=train, rng=rng).astype(jnp.float32)
        losses = -jnp.sum(batch["target"] * jax.nn.log_softmax(logits), axis=-1)
        right = jnp.argmax(logits, axis=-1) == jnp.argmax(batch["target"], axis=-1)
        _, _, model_state = nnx.split(model, nnx.Param, ...)
        metrics = {"loss": losses, "accuracy": right.astype(jnp.float32)}
        return losses, metrics, nnx.to_pure_dict(model_state)

    def _create(self, rngs: nnx.Rngs) -> nnx.Module:
        model = self._config.model
        from_data = {
            "num_classes": self._num_classes,
            "image_size": self._image_shape[:2],
            "channels": self._image_shape[2],
        }
        options = {"attention": model.attention_kinds, "dtype": model.dtype, **from_data}
        return models.create(model.name, rngs=rngs, **{**options, **model.options})
