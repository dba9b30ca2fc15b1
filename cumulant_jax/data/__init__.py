"""Image classification data through Grain: digits, TFDS data sets, folders, lists and arrays."""

from cumulant_jax.data.arrays import ArrayCollection
from cumulant_jax.data.augment import AUGMENTATIONS
from cumulant_jax.data.batches import EvalBatches, eval_batches, train_iterator
from cumulant_jax.data.config import DataConfig
from cumulant_jax.data.dataset import Dataset, DatasetInfo, load
from cumulant_jax.data.stream import TrainIterator

__all__ = [
    "AUGMENTATIONS",
    "ArrayCollection",
    "DataConfig",
    "Dataset",
    "DatasetInfo",
    "EvalBatches",
    "TrainIterator",
    "eval_batches",
    "load",
    "train_iterator",
]
