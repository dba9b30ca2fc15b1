"""Time and memory of the attention kinds against the number of tokens."""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cumulant_jax.analysis.timing import time_in_turn
from cumulant_jax.attention import (
    KINDS,
    attention,
    cross_covariance_attention,
    token_statistics_attention,
)

DOT_PRODUCT = "jax.nn.dot_product_attention"
# Moments per key feature: what is multiplied with the values, in multiples of the head dim.
_MATRIX_WIDTHS = {"linear": 1, "cumulant2": 1, "cumulant3": 2, "cumulant4": 3}
QUADRATIC = ("softmax", DOT_PRODUCT)
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a measurement; the arrays are [batch, tokens, heads, dim]."""

    tokens: int
    batch: int = 1
    heads: int = 6
    dim: int = 64
    dtype: str = "float32"

    def arrays(self, count: int) -> list[jax.Array]:
        """Makes normally distributed arrays."""
        random = np.random.default_rng(0)
        shape = (self.batch, self.tokens, self.heads, self.dim)
        return [
            jnp.asarray(random.standard_normal(shape, np.float32), self.dtype) for _ in range(count)
        ]

    def matmul_flops(self, kind: str) -> int | None:
        """FLOPs of forward and backward in the kind's own matrix products; None if not known.

        Sum and read-out are two products of tokens × width·dim × dim, forward; backward has two for
        each of them.
        """
        if kind not in _MATRIX_WIDTHS:
            return None
        product = 2 * self.tokens * _MATRIX_WIDTHS[kind] * self.dim**2
        return 6 * product * self.batch * self.heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Forward and backward of one kind at one number of tokens, in seconds.

    Attributes:
      kind: the attention kind, or the name of what it is compared with.
      tokens: number of tokens.
      seconds: median time.
      best_seconds: fastest round.
      matmul_seconds: median time of one large square matrix product of the same FLOPs, measured in
        turn with it; None where the kind is not made of matrix products.
      temporary_bytes: XLA's temporaries beyond inputs, outputs and gradients; None where it has no
        analysis.
    """

    kind: str
    tokens: int
    seconds: float
    best_seconds: float
    matmul_seconds: float | None
    temporary_bytes: int | None


def measure(kinds: Sequence[str], case: Case, *, rounds: int = 7) -> list[Cost]:
    """Times forward plus backward of kinds in turn, with their matrix-product floors."""
    compiled = {kind: compile_forward_and_backward(kind, case) for kind in kinds}
    inputs = case.arrays(4)
    functions: dict[str, Callable[[], Any]] = {}
    for kind, call in compiled.items():
        functions[kind] = lambda call=call: call(*inputs)
        flops = case.matmul_flops(kind)
        if flops is not None:
            functions[f"{kind} floor"] = _square_matmul(flops)
    timings = time_in_turn(functions, rounds=rounds)
    return [
        Cost(
            kind=kind,
            tokens=case.tokens,
            seconds=timings[kind].median,
            best_seconds=timings[kind].best,
            matmul_seconds=timings[f"{kind} floor"].median if f"{kind} floor" in timings else None,
            temporary_bytes=_temporary_bytes(compiled[kind]),
        )
        for kind in kinds
    ]


def _temporary_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def compile_forward_and_backward(kind: str, case: Case):
    """Compiles (query, key, value, cotangent) → (output, gradients) of a kind."""
    function = attention_of(kind)

    def run(query, key, value, cotangent):
        output, pull_back = jax.vjp(function, query, key, value)
        return output, pull_back(cotangent)

    shape = jax.ShapeDtypeStruct((case.batch, case.tokens, case.heads, case.dim), case.dtype)
    return jax.jit(run).lower(*[shape] * 4).compile()


def attention_of(kind: str) -> Callable[..., jax.Array]:
    """The function of a kind on (query, key, value); token statistics use the first alone."""
    special = {
        DOT_PRODUCT: jax.nn.dot_product_attention,
        "tssa": lambda query, key, value: token_statistics_attention(query, temperature=1.0),
        "xca": lambda query, key, value: cross_covariance_attention(
            query, key, value, temperature=1.0
        ),
    }
    return special.get(kind) or (lambda *arrays: attention(kind, *arrays))


def measurable_kinds() -> list[str]:
    """The names that `measure` takes."""
    return [*KINDS, "tssa", "xca", DOT_PRODUCT]


def peak_memory(kind: str, case: Case) -> int:
    """Peak resident bytes of a fresh process that runs forward and backward once, all included."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_this_process, (kind, case))


def _peak_of_this_process(kind: str, case: Case) -> int:
    # A new process starts with its parent's peak to its name; Linux lets it be reset.
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")
    jax.block_until_ready(compile_forward_and_backward(kind, case)(*case.arrays(4)))
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _square_matmul(flops: int) -> Callable[[], jax.Array]:
    size = max(1, round((flops / 2) ** (1 / 3)))
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
    multiply = jax.jit(lambda a: a @ a)
    return lambda: multiply(matrix)
