"""Batches of a data set through Grain: the endless training stream and one pass for evaluation.

Both are pure functions of an index. Training batch `step` depends on (seed, step) alone: not on
threads, worker processes, the number of processes that share it, or where a run was interrupted.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from absl import flags

from cumulant_jax.data import augment, random_order
from cumulant_jax.data.config import DataConfig
from cumulant_jax.data.dataset import Dataset
from cumulant_jax.data.source import ArraySource, ImageSource

Batch = dict[str, np.ndarray]

# Grain asks for a length; no run gets there.
_ENDLESS = 2**62


class TrainIterator(grain.DatasetIterator):
    """The endless stream of training batches, which can be saved and restored at any step.

    Its state is small and JSON-serialisable: the next step and what the stream was made from. It
    does not depend on worker or process counts, so a run may resume on other ones.
    """

    def __init__(
        self,
        open_at: Callable[[int], grain.DatasetIterator],
        identity: dict[str, Any],
        step: int,
    ):
        super().__init__()
        self._open_at = open_at
        self._identity = identity
        self._step = step
        self._iterator = open_at(step)

    def __next__(self) -> Batch:
        """Returns the next batch: image uint8 [B, H, W, C] and label int32 [B]."""
        batch = next(self._iterator)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position, before the next batch, as a dict that JSON can hold."""
        return {"step": self._step, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a saved position.

        Raises:
          ValueError: it is no state, or belongs to another stream (other data, seed, …).
        """
        step = state.get("step") if isinstance(state, dict) else None
        if type(step) is not int or step < 0:
            raise ValueError(f"state must be a dict from get_state() with a step, got {state!r}")
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ValueError(
                    f"state: {name} is {state.get(name)!r}, but this iterator has {value!r}; "
                    "it was saved by another run"
                )
        self._iterator.close()
        self._step = step
        self._iterator = self._open_at(self._step)

    def start_prefetch(self) -> None:
        """Starts reading before the first batch is asked for; Grain calls it after a restore."""
        self._iterator.start_prefetch()

    def close(self) -> None:
        """Stops reading ahead; the iterator cannot be used afterwards."""
        super().close()
        if hasattr(self, "_iterator"):  # absent where opening failed and the object is deleted
            self._iterator.close()


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
    share = _share(batch_size, process_index, process_count)
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
        lambda step: iter(_pipeline(batches, source, config, first=step)), identity, start_step
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
    share = _share(batch_size, process_index, process_count)
    source = dataset.source(split or dataset.config.eval_split)
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
        iterator = iter(_pipeline(self, self._source, self._config))
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
        return _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        first = step * self._batch_size
        indices = random_order.batch_indices(
            len(self._source), self._seed, first + self._share.start, first + self._share.stop
        )
        images, labels = self._source.gather(indices)
        for position, augmentation in enumerate(self._augmentations):
            # Drawn for the whole batch: an example's words do not depend on how many share it.
            words = random_order.augment_words(
                self._seed, position, step, self._batch_size, augmentation.words_per_example
            )
            images = augmentation(images, words[self._share])
        return {"image": images, "label": labels}


def _no_examples(source: ImageSource) -> tuple[np.ndarray, np.ndarray]:
    return np.empty((0, *source.image_shape), np.uint8), np.empty(0, np.int32)


def _share(batch_size: int, process_index: int, process_count: int) -> slice:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("process_count", process_count, 1),
        ("process_index", process_index, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if process_index >= process_count:
        raise ValueError(
            f"process_index must be below process_count={process_count}, got {process_index}"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of process_count={process_count}"
        )
    size = batch_size // process_count
    return slice(process_index * size, (process_index + 1) * size)


def _pipeline(
    batches: Any, source: ImageSource, config: DataConfig, *, first: int = 0
) -> grain.IterDataset:
    """Batches by index, from `first` on -> Grain's prefetching stream.

    The element that Grain handles is a batch, not an example: one gather instead of one Python call
    per image, and an order that does not change with the number of workers. Images that are decoded
    on demand are read by the source's own threads, several batches at a time.
    """
    in_memory = isinstance(source, ArraySource)
    options = grain.ReadOptions(
        num_threads=1 if in_memory else min(2, config.prefetch),
        prefetch_buffer_size=config.prefetch,
    )
    stream = grain.MapDataset.source(batches)[first:].to_iter_dataset(options)
    if config.workers:
        if not flags.FLAGS.is_parsed():
            # Grain's worker processes read absl flags, which only programs run by absl.app parse.
            flags.FLAGS.mark_as_parsed()
        per_worker = max(1, config.prefetch // config.workers)
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=config.workers, per_worker_buffer_size=per_worker
            )
        )
    return stream
