"""Attention on this device against its own limits, against XLA and against the peers.

The limits are measured in the same run: how fast the device copies, and how fast it multiplies
large matrices. A call cannot take less than its bytes over the one or its FLOPs over the other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cumulant_jax.analysis import torch_peers
from cumulant_jax.analysis.timing import time_in_turn
from cumulant_jax.attention import attention, token_statistics_attention
from cumulant_jax.kernels import IMPLEMENTATIONS

DOT_PRODUCT = "jax.nn.dot_product_attention"
# Features per key dimension, times the values: what is summed and read out.
_DEGREE = {"linear": 1, "cumulant2": 1, "cumulant3": 2, "cumulant4": 3}
# Relative to the largest entry: a few roundings of the inputs' dtype.
_TOLERANCE = {"float32": 5e-5, "bfloat16": 3e-2, "float16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What this device can do, measured.

    Attributes:
      bytes_per_second: read plus written by a copy of a large array.
      flops_per_second: of a large square matrix product in the benchmark's dtype.
    """

    bytes_per_second: float
    flops_per_second: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation at one size; arrays are [batch, tokens, heads, dim].

    Attributes:
      kind: "linear", "cumulant2", "cumulant3", "cumulant4" or "tssa".
      tokens: number of tokens.
      batch: batch size.
      heads: number of heads.
      dim: of a head.
      dtype: of all arrays.
      is_causal: whether each token attends to those up to it.
    """

    kind: str
    tokens: int
    batch: int = 1
    heads: int = 12
    dim: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False

    @property
    def name(self) -> str:
        """Such as "causal cumulant3"."""
        return f"causal {self.kind}" if self.is_causal else self.kind

    @property
    def num_inputs(self) -> int:
        """Token arrays that the operation takes."""
        return 1 if self.kind == "tssa" else 3

    def bytes(self, *, backward: bool) -> int:
        """The least that must move: each input read and each output written once.

        The backward pass reads the inputs and the output's cotangent and writes a cotangent for
        each input.
        """
        arrays = self.num_inputs + 1 + backward * (2 * self.num_inputs + 1)
        size = self.batch * self.tokens * self.heads * self.dim
        return arrays * size * jnp.dtype(self.dtype).itemsize

    def flops(self, *, backward: bool) -> int:
        """Of the matrix products: two forward, four backward. Token statistics have none."""
        product = 2 * self.batch * self.heads * self.tokens * self.dim**2
        return _DEGREE.get(self.kind, 0) * product * (6 if backward else 2)

    def floor(self, rates: Rates, *, backward: bool) -> float:
        """Seconds below which no program can go on a device with these rates."""
        return max(
            self.bytes(backward=backward) / rates.bytes_per_second,
            self.flops(backward=backward) / rates.flops_per_second,
        )

    def function(self, implementation: str | None) -> Callable[..., jax.Array]:
        """The operation on its inputs."""
        options: dict[str, Any] = {
            "is_causal": self.is_causal,
            "implementation": implementation,
        }
        if self.kind == "tssa":
            return lambda w: token_statistics_attention(w, temperature=1.0, **options)
        return lambda q, k, v: attention(self.kind, q, k, v, **options)

    def arrays(self, count: int) -> list[jax.Array]:
        """Normally distributed arrays."""
        shape = (self.batch, self.tokens, self.heads, self.dim)
        keys = jax.random.split(jax.random.key(0), count)
        return [jax.random.normal(key, shape, jnp.float32).astype(self.dtype) for key in keys]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelResult:
    """What was measured of one case, in seconds by name of the implementation or peer."""

    case: KernelCase
    implementation: str
    forward: dict[str, float]
    both: dict[str, float]
    floor: tuple[float, float]
    error: float


def measure_rates(dtype: str, *, gigabytes: float | None = None) -> Rates:
    """Measures copy and matrix-product rates of the default device."""
    small = jax.default_backend() == "cpu"
    gigabytes = gigabytes or (0.125 if small else 2.0)
    size = 1024 if small else 8192
    words = jnp.zeros((int(gigabytes * 2**28),), jnp.int32)
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), dtype)
    copy, multiply = jax.jit(lambda x: x ^ 1), jax.jit(lambda a: a @ a)
    timings = time_in_turn({"copy": lambda: copy(words), "matmul": lambda: multiply(matrix)})
    return Rates(2 * words.nbytes / timings["copy"].median, 2 * size**3 / timings["matmul"].median)


def measure_case(
    case: KernelCase,
    rates: Rates,
    *,
    rounds: int = 7,
    torch_python: str | None = None,
    most_quadratic_tokens: int = 1 << 20,
) -> KernelResult:
    """Checks one case against XLA in float32 and times it against XLA and the peers.

    Args:
      case: what to run.
      rates: of this device.
      rounds: rounds that are counted.
      torch_python: an interpreter that has PyTorch, for the peers; None for none.
      most_quadratic_tokens: beyond these, softmax attention is left out.
    """
    implementation = chosen_implementation(case)
    names = dict.fromkeys([implementation, "xla"])
    forward = {name: _forward(case, case.function(name)) for name in names}
    both = {name: _both(case, case.function(name)) for name in names}
    if case.kind != "tssa" and case.tokens <= most_quadratic_tokens:
        peer = _dot_product(case)
        forward[DOT_PRODUCT], both[DOT_PRODUCT] = _forward(case, peer), _both(case, peer)
    seconds = [
        {name: t.median for name, t in time_in_turn(calls, rounds=rounds).items()}
        for calls in (forward, both)
    ]
    if torch_python is not None:
        for peer, times in torch_seconds(torch_python, case).items():
            seconds[0][peer], seconds[1][peer] = times["forward"], times["both"]
    return KernelResult(
        case=case,
        implementation=implementation,
        forward=seconds[0],
        both=seconds[1],
        floor=(case.floor(rates, backward=False), case.floor(rates, backward=True)),
        error=largest_error(case, implementation),
    )


def seconds_of(case: KernelCase, implementation: str, *, rounds: int = 7) -> float:
    """The median time of forward and backward."""
    call = _both(case, case.function(implementation))
    return time_in_turn({"call": call}, rounds=rounds)["call"].median


def chosen_implementation(case: KernelCase) -> str:
    """The name of what serves a case on this device."""
    for name in IMPLEMENTATIONS:
        if name != "xla":
            try:
                jax.eval_shape(case.function(name), *_shapes(case))
            except NotImplementedError:
                continue
            return name
    return "xla"


def largest_error(case: KernelCase, implementation: str) -> float:
    """The largest error of output and gradients, each relative to its largest entry.

    The truth is XLA's, on the same numbers in float32.

    Raises:
      ArithmeticError: the error is beyond the rounding of the dtype.
    """
    *inputs, cotangent = case.arrays(case.num_inputs + 1)
    actual = _both(case, case.function(implementation))()
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in inputs]
        out, pull = jax.vjp(case.function("xla"), *wide)
        expected = (out, pull(cotangent.astype(jnp.float32)))
    largest = 0.0
    names = ["output", *(f"gradient {i}" for i in range(case.num_inputs))]
    leaves = zip(names, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for name, x, truth in leaves:
        error = float(jnp.max(jnp.abs(x - truth)) / jnp.max(jnp.abs(truth)))
        largest = max(largest, error)
        if not error <= _TOLERANCE[case.dtype]:
            raise ArithmeticError(
                f"{case.name} with {implementation} at {case.tokens} tokens is wrong: relative "
                f"error {error:.1e} of the {name}, more than {_TOLERANCE[case.dtype]:.0e}."
            )
    return largest


def torch_seconds(python: str, case: KernelCase) -> dict[str, dict[str, float]]:
    """Times PyTorch's counterparts in a process of that interpreter, see `torch_peers`."""
    fields = {n: getattr(case, n) for n in ("tokens", "batch", "heads", "dim", "dtype")}
    command = [python, str(Path(torch_peers.__file__)), json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{python} cannot measure the PyTorch peers: {lines[-1]}")
    return json.loads(done.stdout)["seconds"]


def _shapes(case: KernelCase) -> list[jax.ShapeDtypeStruct]:
    shape = (case.batch, case.tokens, case.heads, case.dim)
    return [jax.ShapeDtypeStruct(shape, case.dtype)] * case.num_inputs


def _forward(case: KernelCase, function) -> Callable[[], Any]:
    inputs, call = case.arrays(case.num_inputs), jax.jit(function)
    return lambda: call(*inputs)


def _both(case: KernelCase, function) -> Callable[[], Any]:
    *inputs, cotangent = case.arrays(case.num_inputs + 1)

    @jax.jit
    def call(inputs, cotangent):
        out, pull = jax.vjp(function, *inputs)
        return out, pull(cotangent)

    return lambda: call(inputs, cotangent)


def _dot_product(case: KernelCase) -> Callable[..., jax.Array]:
    """Softmax attention as JAX has it: cuDNN's on a GPU."""
    on_gpu = jax.default_backend() == "gpu" and case.dtype != "float32"
    return functools.partial(
        jax.nn.dot_product_attention,
        is_causal=case.is_causal,
        implementation="cudnn" if on_gpu else None,
    )
