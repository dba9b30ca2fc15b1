"""Bytes and FLOPs of each pass over the tokens, in closed form from the shapes.

Bytes are what a pass must move if it reads every input and writes every output once: token arrays
in their dtype, moments and matrices in float32. Pivots, scales and masks, a few numbers per head or
bits per token, are left out. FLOPs are those of the matrix products, padding not counted; the
features cost a few operations per element beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# Features per key dimension, and whether the constant 1 is one more.
_FEATURES = {
    "linear": (1, False),
    "cumulant2": (1, True),
    "cumulant3": (2, True),
    "cumulant4": (3, True),
}

#: Tokens of a chunk, inside which the causal form multiplies queries with keys.
CAUSAL_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one call of a kernel.

    Attributes:
      bytes: that must move.
      flops: of its products; those of token statistics, which has none, of its vector operations.
    """

    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that the cost of a pass depends on; T = S and H = K unless they are given.

    Attributes:
      batch: B.
      tokens: T, of queries, and of keys.
      heads: H.
      dim: D.
      value_dim: V.
      features: F, the constant included.
      itemsize: bytes of an element of the token arrays.
      has_denominator: whether what is read out has a column more, which divides the others.
    """

    batch: int
    tokens: int
    heads: int
    dim: int
    value_dim: int
    features: int
    itemsize: int
    has_denominator: bool = False

    @classmethod
    def of(cls, kind: str, *, batch: int, tokens: int, heads: int, dim: int, itemsize: int):
        """The sizes of an attention kind with V = D.

        >>> Sizes.of("cumulant3", batch=1, tokens=10, heads=2, dim=64, itemsize=2).features
        129
        """
        degree, has_constant = _FEATURES.get(kind, (0, False))
        return cls(
            batch=batch,
            tokens=tokens,
            heads=heads,
            dim=dim,
            value_dim=dim,
            features=degree * dim + has_constant,
            itemsize=itemsize,
            has_denominator=kind == "linear",
        )

    @property
    def rows(self) -> int:
        """Tokens of all heads."""
        return self.batch * self.tokens * self.heads

    @property
    def keys(self) -> int:
        """Bytes of the keys, or of the queries."""
        return self.rows * self.dim * self.itemsize

    @property
    def values(self) -> int:
        """Bytes of the values, or of the output."""
        return self.rows * self.value_dim * self.itemsize

    @property
    def moments(self) -> int:
        """Bytes of the moments [B, H, F, V + 1]."""
        return 4 * self.batch * self.heads * self.features * (self.value_dim + 1)

    @property
    def matrix(self) -> int:
        """Bytes of the read-out matrix [B, H, F, V or V + 1]."""
        return 4 * self.batch * self.heads * self.features * self.columns

    @property
    def columns(self) -> int:
        """Columns of the read-out matrix."""
        return self.value_dim + self.has_denominator

    @property
    def summing(self) -> int:
        """FLOPs of features ⊗ (values, 1)."""
        return 2 * self.rows * self.features * (self.value_dim + 1)

    @property
    def reading(self) -> int:
        """FLOPs of features times the matrix."""
        return 2 * self.rows * self.features * self.columns


def _sum_moments(s: Sizes) -> Cost:
    return Cost(s.keys + s.values + s.moments, s.summing)


def _sum_moments_backward(s: Sizes) -> Cost:
    return Cost(2 * (s.keys + s.values) + s.moments, 2 * s.summing)


def _read_out(s: Sizes) -> Cost:
    return Cost(s.keys + s.matrix + s.values, s.reading)


def _read_out_backward(s: Sizes) -> Cost:
    # A quotient is read out again before it can be differentiated.
    products = 3 if s.has_denominator else 2
    return Cost(2 * s.keys + s.values + 2 * s.matrix, products * s.reading)


def _fused(s: Sizes) -> Cost:
    return Cost(2 * s.keys + 2 * s.values, s.summing + s.reading)


def _fused_backward(s: Sizes) -> Cost:
    flops = s.summing + _read_out_backward(s).flops + _sum_moments_backward(s).flops
    return Cost(4 * s.keys + 3 * s.values, flops)


def _causal(s: Sizes) -> Cost:
    # Inside a chunk: scores of queries and keys, then scores times (values, 1). Between chunks: the
    # moments so far are read out with (values, 1) too.
    chunk = min(CAUSAL_CHUNK, s.tokens)
    inside = 2 * s.rows * chunk * (s.features + s.value_dim + 1)
    return Cost(2 * s.keys + 2 * s.values + 2 * s.moments, inside + 2 * s.summing)


def _causal_backward(s: Sizes) -> Cost:
    # Each product has two in its backward pass, and is done again there.
    return Cost(4 * s.keys + 3 * s.values + 3 * s.moments, 3 * _causal(s).flops)


def _token_statistics(s: Sizes) -> Cost:
    # Per element: its square, share of the energy (2), weighted sum (2), energy, output (2).
    return Cost(2 * s.values, 8 * s.rows * s.dim)


def _token_statistics_backward(s: Sizes) -> Cost:
    # The forward pass again, and about two operations for each of its.
    return Cost(3 * s.values, 24 * s.rows * s.dim)


KERNELS: dict[str, Callable[[Sizes], Cost]] = {
    "sum_moments": _sum_moments,
    "sum_moments_backward": _sum_moments_backward,
    "read_out": _read_out,
    "read_out_backward": _read_out_backward,
    "fused_attention": _fused,
    "fused_attention_backward": _fused_backward,
    "causal_attention": _causal,
    "causal_attention_backward": _causal_backward,
    "token_statistics": _token_statistics,
    "token_statistics_backward": _token_statistics_backward,
    "causal_token_statistics": _token_statistics,
    "causal_token_statistics_backward": _token_statistics_backward,
}


def kernel_cost(kernel: str, sizes: Sizes) -> Cost | None:
    """What a kernel must move and multiply; None for one without a formula.

    Args:
      kernel: its name in the compiled program.
      sizes: of the call.

    >>> s = Sizes.of("cumulant2", batch=1, tokens=100, heads=1, dim=4, itemsize=4)
    >>> kernel_cost("sum_moments", s)  # keys and values 2·100·4·4, moments 5·5·4
    Cost(bytes=3300, flops=5000)
    """
    formula = KERNELS.get(kernel)
    return None if formula is None else formula(sizes)


def predicted_seconds(
    *, bytes: int, flops: int, bandwidth: float, matmul_flops: float, issue_seconds: float = 0.0
) -> float:
    """The time of a kernel that overlaps all it does: that of what takes longest.

    Args:
      bytes: that it moves.
      flops: of its products.
      bandwidth: of the chip, in bytes per second.
      matmul_flops: of the chip, per second.
      issue_seconds: what issuing its instructions takes, where that is known.

    >>> predicted_seconds(bytes=3_350, flops=0, bandwidth=3.35e12, matmul_flops=989e12)
    1e-09
    """
    return max(bytes / bandwidth, flops / matmul_flops, issue_seconds)
