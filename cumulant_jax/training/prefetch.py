"""Batches on the device ahead of time, with the position of the one in use."""

import collections
from typing import Any

import jax
from jax.sharding import NamedSharding

from cumulant_jax.training.mesh import to_devices


class DevicePrefetch:
    """Iterates over batches that are on their way to the devices before they are asked for.

    The data iterator runs ahead of the training, so its own state is not the one to save: `state`
    is the one after the last batch handed out.
    """

    def __init__(self, iterator: Any, sharding: NamedSharding, *, depth: int = 2):
        """Starts with the iterator's position.

        Args:
          iterator: a Grain iterator of dicts of NumPy arrays, with `get_state`.
          sharding: the layout of the batches.
          depth: batches to hold ready.
        """
        self._iterator = iterator
        self._sharding = sharding
        self._depth = depth
        self._ready: collections.deque[tuple[dict[str, jax.Array], dict]] = collections.deque()
        self.state: dict[str, Any] = iterator.get_state()

    def __iter__(self) -> "DevicePrefetch":
        return self

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the next batch and starts the transfer of another."""
        while len(self._ready) <= self._depth:
            batch = to_devices(next(self._iterator), self._sharding)
            self._ready.append((batch, self._iterator.get_state()))
        batch, self.state = self._ready.popleft()
        return batch
