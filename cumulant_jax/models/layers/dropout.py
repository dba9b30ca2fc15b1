"""Randomness inside a model: keys handed down at call time, and drop path."""

from flax import nnx
from jax import Array


def key_at(keys: Array | None, index: int) -> Array | None:
    """One key of an array of keys, or None where there are none.

    A model splits its key once, at the top: a split in every layer
    would be as many small programs.

    >>> key_at(None, 3) is None
    True
    """
    return None if keys is None else keys[index]


class DropPath(nnx.Module):
    """Stochastic depth (arXiv 1603.09382): drops a residual branch for some examples.

    A branch is dropped with probability `rate` for each example by itself, and divided by 1 - rate
    where it stays, so that its mean over the drops is what it is in evaluation.
    """

    def __init__(self, rate: float):
        """Keeps the probability of dropping, 0 <= rate < 1."""
        # One Bernoulli draw per example: the mask is broadcast over tokens and features.
        self.dropout = nnx.Dropout(rate, broadcast_dims=(1, 2))

    def __call__(self, branch: Array, *, train: bool = False, rng: Array | None = None) -> Array:
        """Drops examples of branch [batch, tokens, dim] in training, which needs a key."""
        return self.dropout(branch, deterministic=not train, rngs=rng)


def linear_rates(rate: float, depth: int) -> list[float]:
    """Drop-path probabilities that rise linearly from 0 in the first block to `rate` in the last.

    >>> linear_rates(0.5, 3)
    [0.0, 0.25, 0.5]
    """
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


def constant_rates(rate: float, depth: int) -> list[float]:
    """The same drop-path probability for every block.

    >>> constant_rates(0.5, 3)
    [0.5, 0.5, 0.5]
    """
    return [rate] * depth
