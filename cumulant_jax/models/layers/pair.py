"""What a classifier of pairs of sequences sees of them."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array


def concat(first: Array, second: Array) -> Array:
    """Both features, [..., 2 dim] of twice [..., dim]; the Long Range Arena's.

    >>> concat(jnp.array([2.0]), jnp.array([3.0])).tolist()
    [2.0, 3.0]
    """
    return jnp.concatenate([first, second], axis=-1)


def nli(first: Array, second: Array) -> Array:
    """Both features, their product and their difference, [..., 4 dim] of twice [..., dim].

    This is how natural language inference compares sentences (Mou et al., arXiv 1512.08422).

    >>> nli(jnp.array([2.0]), jnp.array([3.0])).tolist()
    [2.0, 3.0, 6.0, -1.0]
    """
    return jnp.concatenate([first, second, first * second, first - second], axis=-1)


#: Name of an interaction to its function.
INTERACTIONS: dict[str, Callable[[Array, Array], Array]] = {"concat": concat, "nli": nli}

#: How many times the features of one sequence an interaction has.
WIDTHS = {"concat": 2, "nli": 4}
