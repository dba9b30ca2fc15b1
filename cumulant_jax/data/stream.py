"""Streams of batches through Grain, for every kind of data: by index, prefetched, resumable.

A batch is a function of its number alone, so a stream may be opened at any step, read by threads or
worker processes, and shared between processes without changing what it holds.
"""

from collections.abc import Callable
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

Batch = dict[str, np.ndarray]

#: The length of a training stream: Grain asks for one, and no run gets there.
ENDLESS = 2**62


class BatchSource(Protocol):
    """Batches by number. Pickles into worker processes where those are used."""

    def __len__(self) -> int:
        """Number of batches, `ENDLESS` for training."""
        ...

    def __getitem__(self, index: int) -> Batch:
        """Returns batch number `index`, the same arrays whenever it is asked for."""
        ...


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


def process_share(batch_size: int, process_index: int, process_count: int) -> slice:
    """Returns the part of a global batch that a process reads.

    Raises:
      ValueError: for an argument out of range, naming it.

    >>> process_share(12, process_index=1, process_count=3)
    slice(4, 8, None)
    """
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


def open_stream(
    batches: BatchSource, *, first: int = 0, threads: int = 1, workers: int = 0, prefetch: int = 4
) -> grain.IterDataset:
    """Returns Grain's prefetching stream of the batches from number `first` on.

    The element that Grain handles is a batch, not an example: one gather instead of one Python call
    per example, and an order that does not change with the number of workers.

    Args:
      batches: what is read.
      first: number of the first batch.
      threads: batches made at a time in a process; examples may have threads of their own.
      workers: processes that make batches; 0 makes them in this process.
      prefetch: batches kept ready.
    """
    options = grain.ReadOptions(num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch)
    stream = grain.MapDataset.source(batches)[first:].to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            # Grain's worker processes read absl flags, which only programs run by absl.app parse.
            flags.FLAGS.mark_as_parsed()
        per_worker = max(1, prefetch // workers)
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=per_worker)
        )
    return stream
