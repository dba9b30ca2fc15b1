"""Random numbers as pure functions of (seed, purpose, index), the same in every NumPy release.

They come from the raw words of the Philox counter generator, whose stream NumPy guarantees; the
derived methods of `numpy.random.Generator` (permutation, integers) may change between releases, and
with them the data order of a resumed run.
"""

import functools

import numpy as np

_ORDER = 0
_AUGMENT = 1
_MAX_SEED = 2**63


def check_seed(seed: int) -> int:
    """Returns `seed`, or raises ValueError where it is not an integer in 0 .. 2**63 - 1."""
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed must be in 0 .. 2**63 - 1, got {seed}")
    return int(seed)


def _words(seed: int, purpose: int, index: int, count: int) -> np.ndarray:
    # One purpose and index owns 2**128 counter values, so streams never overlap.
    return np.random.Philox(key=[seed, purpose], counter=[0, 0, index, 0]).random_raw(count)


@functools.lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of one epoch: int64 [size], each index once.

    >>> sorted(permutation(5, seed=3, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    order = np.argsort(_words(seed, _ORDER, epoch, size), kind="stable")
    order.flags.writeable = False
    return order


def batch_indices(size: int, seed: int, start: int, stop: int) -> np.ndarray:
    """Returns the examples at positions start .. stop - 1 of the endless shuffled stream.

    The stream is the permutation of epoch 0, then that of epoch 1, and so on: a batch may hold the
    end of one epoch and the beginning of the next, so no example is ever left out.

    Args:
      size: number of examples.
      seed: seed of the order.
      start: first position.
      stop: position after the last one.

    Returns:
      int64 [stop - start].

    >>> sorted(batch_indices(4, seed=0, start=4, stop=8).tolist())
    [0, 1, 2, 3]
    """
    parts = []
    while start < stop:
        epoch, offset = divmod(start, size)
        count = min(stop - start, size - offset)
        parts.append(permutation(size, seed, epoch)[offset : offset + count])
        start += count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def augment_words(seed: int, position: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """Returns uint64 [batch_size, count] for the augmentation at `position` of the list.

    >>> augment_words(0, position=0, step=7, batch_size=2, count=3).shape
    (2, 3)
    """
    words = _words(seed, _AUGMENT + position, step, batch_size * count)
    return words.reshape(batch_size, count)
