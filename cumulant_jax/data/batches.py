"""Batches of a data set through Grain: the endless training stream and one pass for evaluation.

Both are pure functions of an index. Training batch `step` depends on (seed, step) alone: not on
threads, worker processes, the number of processes that share it, or where a run was interrupted.
"""

from collections.abc import Iterator

import grain
import numpy as np

from cumulant_jax.data import augment, random_order
from cumulant_jax.data.config import DataConfig
from cumulant_jax.data.dataset import Dataset
from cumulant_jax.data.source import ArraySource, ImageSource
from cumulant_jax.data.stream import (
    ENDLESS,
    Batch,
    BatchSource,
    TrainIterator,
    open_stream,
    process_share,
)


def train_iterator(
    dataset: Dataset,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainIterator:
    """Returns the endless stream of training batches from `start_step` on.

    The stream runs through a fresh permutation of the training split per epoch. A batch may cross
    the end of an epoch, so nothing is dropped: E epochs are E * num_train / batch_size steps.

    Args:
      dataset: the data set.
      batch_size: examples per step, of all processes together.
      seed: seed of order and augmentation, 0 .. 2**63 - 1.
      start_step: step of the first batch.
      process_index: number of this process.
      process_count: processes that share a batch; this one gets the examples
        process_index * n .. (process_index + 1) * n - 1 of it, n = batch_size / process_count.

    Returns:
      An iterator of dicts with image uint8 [n, H, W, C] and label int32 [n]. It prefetches in the
      background; `close()` ends that.

    Raises:
      TypeError, ValueError: for an argument out of range, naming it.

    >>> from cumulant_jax.data import DataConfig, load
    >>> batches = train_iterator(load(DataConfig(name="digits")), batch_size=32, seed=0)
    >>> {name: array.shape for name, array in next(batches).items()}
    {'image': (32, 8, 8, 1), 'label': (32,)}
    >>> batches.get_state()["step"]
    1
    """
    share = process_share(batch_size, process_index, process_count)
    if type(start_step) is not int or start_step < 0:
        raise ValueError(f"start_step must be a non-negative integer, got {start_step!r}")
    config = dataset.config
    source = dataset.source(config.train_split)
    seed = random_order.check_seed(seed)
    batches = _TrainBatches(source, config.augment, seed, batch_size, share)
    identity = {
        "dataset": f"{dataset.info.name}/{dataset.info.version}/{config.train_split}",
        "num_examples": len(source),
        "seed": seed,
        "batch_size": batch_size,
        "augment": list(config.augment),
    }
    return TrainIterator(
        lambda step: iter(_stream(batches, source, config, first=step)), identity, start_step
    )


def eval_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    split: str | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> "EvalBatches":
    """Returns the batches of one pass over a split, each example exactly once, in stored order.

    Args:
      dataset: the data set.
      batch_size: examples per batch, of all processes together.
      split: the split; None is the configuration's `eval_split`.
      process_index: number of this process.
      process_count: processes that share a batch, as for `train_iterator`. All get equally many.

    Returns:
      A sized iterable, usable repeatedly, of dicts with image uint8 [n, H, W, C], label int32 [n]
      and weight float32 [n]: 1 for an example, 0 for the padding (black, label 0) at the end.

    >>> from cumulant_jax.data import DataConfig, load
    >>> batches = eval_batches(load(DataConfig(name="digits")), batch_size=100)
    >>> len(batches), int(sum(batch["weight"].sum() for batch in batches))
    (4, 360)
    """
    share = process_share(batch_size, process_index, process_count)
    # `load` put the data set's own name in the place of None.
    source = dataset.source(split or str(dataset.config.eval_split))
    return EvalBatches(source, batch_size, share, dataset.config)


class EvalBatches:
    """One pass over a split; see `eval_batches`."""

    def __init__(self, source: ImageSource, batch_size: int, share: slice, config: DataConfig):
        self._source = source
        self._batch_size = batch_size
        self._share = share
        self._config = config

    def __len__(self) -> int:
        return -(-len(self._source) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = index * self._batch_size
        indices = np.arange(first + self._share.start, first + self._share.stop)
        real = indices[indices < len(self._source)]
        missing = len(indices) - len(real)
        images, labels = self._source.gather(real) if len(real) else _no_examples(self._source)
        if missing:
            images = np.pad(images, [(0, missing), (0, 0), (0, 0), (0, 0)])
            labels = np.pad(labels, (0, missing))
        weight = (indices < len(self._source)).astype(np.float32)
        return {"image": images, "label": labels, "weight": weight}

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(_stream(self, self._source, self._config))
        try:
            yield from iterator
        finally:
            iterator.close()


class _TrainBatches:
    """Training batch number `step`, as a random access source for Grain. Pickles into workers."""

    def __init__(
        self,
        source: ImageSource,
        augmentations: tuple[str, ...],
        seed: int,
        batch_size: int,
        share: slice,
    ):
        self._source = source
        self._augmentations = augment.parse(augmentations)
        self._seed = seed
        self._batch_size = batch_size
        self._share = share

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        first = index * self._batch_size
        indices = random_order.batch_indices(
            len(self._source), self._seed, first + self._share.start, first + self._share.stop
        )
        images, labels = self._source.gather(indices)
        for position, augmentation in enumerate(self._augmentations):
            # Drawn for the whole batch: an example's words do not depend on how many share it.
            words = random_order.augment_words(
                self._seed, position, index, self._batch_size, augmentation.words_per_example
            )
            images = augmentation(images, words[self._share])
        return {"image": images, "label": labels}


def _no_examples(source: ImageSource) -> tuple[np.ndarray, np.ndarray]:
    return np.empty((0, *source.image_shape), np.uint8), np.empty(0, np.int32)


def _stream(
    batches: BatchSource, source: ImageSource, config: DataConfig, *, first: int = 0
) -> grain.IterDataset:
    """The stream of batches: images in memory are read by one thread, others decoded by two."""
    return open_stream(
        batches,
        first=first,
        threads=1 if isinstance(source, ArraySource) else 2,
        workers=config.workers,
        prefetch=config.prefetch,
    )
