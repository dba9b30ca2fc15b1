"""Position embeddings of a sequence, and the table of their names."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import embedding_init


def sincos_1d(tokens: int, dim: int, *, temperature: float = 10000.0) -> np.ndarray:
    """The fixed sine-cosine position embedding of a sequence (arXiv 1706.03762, section 3.5).

    Position t gets sin(t w_i) at feature 2i and cos(t w_i) at 2i + 1, with the dim / 2 frequencies
    w_i = temperature ** (-2i / dim).

    Args:
      tokens: length of the sequence.
      dim: features of a token, an even number.
      temperature: the longest wavelength is 2 pi times (almost) this many tokens.

    Returns:
      float64 [tokens, dim].

    Raises:
      ValueError: dim is odd.

    >>> sincos_1d(2, 4).round(3)
    array([[0.   , 1.   , 0.   , 1.   ],
           [0.841, 0.54 , 0.01 , 1.   ]])
    """
    if dim % 2:
        raise ValueError(f"dim is {dim}, and position='sincos' needs an even number")
    frequencies = temperature ** -(np.arange(0, dim, 2) / dim)
    angles = np.outer(np.arange(tokens), frequencies)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(tokens, dim)


class LearnedSequencePositions(nnx.Module):
    """Adds a learned vector for each position."""

    def __init__(self, *, max_tokens: int, dim: int, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        """Builds the table [max_tokens, dim]."""
        table = embedding_init(rngs.params(), (max_tokens, dim), param_dtype)
        self.position_embedding = nnx.Param(table)

    def __call__(self, tokens: Array, positions: Array | None = None) -> Array:
        """Adds the table to tokens [batch, tokens, dim].

        Args:
          tokens: [batch, tokens, dim].
          positions: int [batch, tokens]; None: 0, 1, ....
        """
        table = self.position_embedding[...].astype(tokens.dtype)
        return tokens + (table[: tokens.shape[1]] if positions is None else table[positions])


class SinCosSequencePositions(nnx.Module):
    """Adds the fixed table of `sincos_1d`."""

    def __init__(self, *, max_tokens: int, dim: int, param_dtype: jnp.dtype, rngs: nnx.Rngs):
        """Keeps the length of the table, which each call makes anew."""
        del param_dtype, rngs
        sincos_1d(1, dim)  # a wrong dim is reported now, not at the first call
        self.max_tokens = max_tokens

    def __call__(self, tokens: Array, positions: Array | None = None) -> Array:
        """Adds the table to tokens [batch, tokens, dim], as `LearnedSequencePositions`."""
        length = tokens.shape[1] if positions is None else self.max_tokens
        table = jnp.asarray(sincos_1d(length, tokens.shape[-1]), tokens.dtype)
        return tokens + (table if positions is None else table[positions])


class NoSequencePositions(nnx.Module):
    """Adds nothing; a causal model can still tell the order."""

    def __init__(self, **unused: object):
        """Takes the arguments of the other position embeddings and needs none."""

    def __call__(self, tokens: Array, positions: Array | None = None) -> Array:
        """Returns the tokens as they came."""
        return tokens


#: Name of a position embedding to its module.
SEQUENCE_POSITIONS: dict[str, type] = {
    "learned": LearnedSequencePositions,
    "sincos": SinCosSequencePositions,
    "none": NoSequencePositions,
}
