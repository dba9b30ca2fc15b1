"""Feature maps: what is summed over the keys and read out with the queries.

A feature map is a hashable callable from [..., tokens, dim] to [..., tokens, features]. It is the
same for keys and queries; constant factors of the expansion belong to the read-out matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Features = Callable[[jax.Array], jax.Array]

# Pairs (i, j) of one block of this many dims by another are one outer product: vectorised, where a
# gather of single pairs (and the scatter in its gradient) would not be.
_PAIR_BLOCK = 16


def elu1(x: jax.Array) -> jax.Array:
    """The positive feature map elu(x) + 1 of linear attention, [..., tokens, dim] to the same."""
    return jax.nn.elu(x) + 1


@dataclasses.dataclass(frozen=True)
class PolynomialFeatures:
    """Monomials of the key or query: 1, x_i, products of pairs, cubes.

    Attributes:
      order: cumulant order 1 to 4; an order needs monomials of degree `order - 1` and below.
      all_pairs: products x_i x_j of all pairs instead of the squares x_i² alone.

    >>> import jax.numpy as jnp
    >>> PolynomialFeatures(order=3)(jnp.array([[2.0, 3.0]]))
    Array([[2., 3., 4., 9., 1.]], dtype=float32)
    """

    order: int
    all_pairs: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., tokens, dim] to [..., tokens, features]; the constant comes last."""
        return jnp.concatenate([*self.blocks(x), jnp.ones_like(x[..., :1])], axis=-1)

    def blocks(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The features but for the constant, in blocks that are cheap to form one by one."""
        degrees = (lambda: (x,), lambda: self._pair_blocks(x), lambda: (x * x * x,))
        return tuple(block for degree in degrees[: self.order - 1] for block in degree())

    def count(self, dim: int) -> int:
        """The number of features of a `dim`-dimensional vector."""
        return jax.eval_shape(self, jax.ShapeDtypeStruct((1, dim), jnp.float32)).shape[-1]

    def pair_indices(self, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs (i, j) behind the product features, and how often each stands for Σ_ij.

        Returns:
          Arrays i, j (int) and multiplicity (float): the sum over all (i, j) of a symmetric f(i, j)
          equals the sum over the listed pairs of multiplicity · f(i, j).
        """
        if not self.all_pairs:
            return np.arange(dim), np.arange(dim), np.ones(dim)
        rows, columns, multiplicity = [], [], []
        for a, b in _block_pairs(dim):
            i, j = np.meshgrid(a, b, indexing="ij")
            rows.append(i.ravel())
            columns.append(j.ravel())
            multiplicity.append(np.full(i.size, 1.0 if a[0] == b[0] else 2.0))
        return np.concatenate(rows), np.concatenate(columns), np.concatenate(multiplicity)

    def pairs(self, x: jax.Array) -> jax.Array:
        """The products x_i x_j, in the order of `pair_indices`."""
        return jnp.concatenate(self._pair_blocks(x), axis=-1)

    def _pair_blocks(self, x: jax.Array) -> tuple[jax.Array, ...]:
        if not self.all_pairs:
            return (x * x,)
        outer = [
            x[..., a[0] : a[-1] + 1, None] * x[..., None, b[0] : b[-1] + 1]
            for a, b in _block_pairs(x.shape[-1])
        ]
        return tuple(o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1]) for o in outer)


def feature_blocks(features: Features, x: jax.Array) -> tuple[jax.Array, ...]:
    """The features of x in blocks, without the constant that polynomials end with."""
    if isinstance(features, PolynomialFeatures):
        return features.blocks(x)
    return (features(x),)


def _block_pairs(dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    blocks = np.split(np.arange(dim), range(_PAIR_BLOCK, dim, _PAIR_BLOCK))
    return [(blocks[m], blocks[n]) for m in range(len(blocks)) for n in range(m, len(blocks))]
