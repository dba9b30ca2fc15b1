"""Every kernel at the shapes it is meant for, to be lowered, compiled and looked at.

Each case takes arrays as projections leave them, [batch, tokens, heads · dim]: only then is the
reshape around a kernel free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cumulant_jax.kernels import mosaic_tpu as tpu
from cumulant_jax.kernels.features import PolynomialFeatures, elu1

Calls = tuple[Callable[..., Any], Callable[..., Any]]


class Case(NamedTuple):
    """A jittable function of arrays like `arguments`, and what its HBM traffic cannot go below.

    Attributes:
      name: kernel, shapes and dtype.
      function: positional arguments only.
      arguments: a tuple of pytrees of `jax.ShapeDtypeStruct`.
      bytes: of the arrays with a token axis that are read or written once.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int


def inspection_cases() -> list[Case]:
    """All kernels, forward and backward, at realistic shapes."""
    order3, order2 = PolynomialFeatures(3), PolynomialFeatures(2)
    cases = []
    for shape in ((8, 197, 12, 64), (1, 4096, 12, 64), (1, 65536, 12, 64), (1, 4096, 8, 128)):
        cases += two_pass_cases(*shape, "bfloat16", order3)
        cases += causal_cases(*shape, "bfloat16", order3)
    for features in (order2, elu1):
        cases += two_pass_cases(1, 4096, 12, 64, "bfloat16", features)
        cases += causal_cases(1, 4096, 12, 64, "bfloat16", features)
    cases += two_pass_cases(1, 4096, 12, 64, "float32", order3)
    cases += two_pass_cases(1, 4096, 12, 64, "bfloat16", order3, masked=True)
    cases += causal_cases(1, 4096, 12, 64, "float32", order3)
    cases += causal_cases(1, 4096, 8, 128, "bfloat16", order3, key_heads=2)
    for dtype, masked in (("bfloat16", False), ("bfloat16", True), ("float32", False)):
        for features in (order3, elu1):
            cases += fused_cases(8, 197, 12, 64, dtype, features, masked=masked)
    cases += fused_cases(8, 197, 3, 64, "bfloat16", order2)
    cases += fused_cases(8, 512, 12, 64, "bfloat16", order3)
    for shape in ((8, 197, 12, 64), (1, 4096, 12, 64), (1, 65536, 16, 64)):
        cases += token_statistics_cases(*shape, "bfloat16")
        cases += causal_token_statistics_cases(*shape, "bfloat16")
    cases += token_statistics_cases(8, 197, 6, 64, "float32", masked=True)
    cases += causal_token_statistics_cases(8, 197, 6, 64, "float32", masked=True)
    return cases


def two_pass_cases(
    batch, tokens, heads, dim, dtype, features, *, masked: bool = False
) -> list[Case]:
    """`sum_moments` and `read_out`, forward and backward."""
    x = _array(batch, tokens, heads * dim, dtype=dtype)
    mask = _array(batch, tokens, 1, dtype=bool) if masked else None
    pivot = _array(batch, heads, dim)
    constant = isinstance(features, PolynomialFeatures)
    rows = features.count(dim) if isinstance(features, PolynomialFeatures) else dim
    sums = _array(batch, heads, rows, dim + 1)
    matrix = _array(batch, heads, rows, dim if constant else dim + 1)
    eps = None if constant else 1e-6
    split, join = _split(tokens, heads), _join(tokens)

    def sum_up(key, value, mask, *pivots):
        return tpu.sum_moments(features, split(key), split(value), mask, *pivots)

    def sum_up_backward(key, value, mask, *rest):
        return join(tpu.sum_moments_backward(features, split(key), split(value), mask, *rest))

    def read(query, matrix):
        return join(tpu.read_out(features, split(query), matrix, eps))

    def read_backward(query, matrix, out_bar):
        return join(tpu.read_out_backward(features, split(query), matrix, eps, split(out_bar)))

    name = functools.partial(_name, batch, tokens, heads, dim, dtype, features, masked)
    return [
        Case(name("sum_moments"), sum_up, (x, x, mask, pivot, pivot), _bytes(x, 2)),
        Case(
            name("sum_moments_backward"),
            sum_up_backward,
            (x, x, mask, pivot, pivot, sums),
            _bytes(x, 4),
        ),
        Case(name("read_out"), read, (x, matrix), _bytes(x, 2)),
        Case(name("read_out_backward"), read_backward, (x, matrix, x), _bytes(x, 3)),
    ]


def fused_cases(batch, tokens, heads, dim, dtype, features, *, masked: bool = False) -> list[Case]:
    """`fused_cumulant` or `fused_linear`, forward and backward."""
    x = _array(batch, tokens, heads * dim, dtype=dtype)
    mask = _array(batch, tokens, 1, dtype=bool) if masked else None
    split, join = _split(tokens, heads), _join(tokens)
    if isinstance(features, PolynomialFeatures):
        calls: Calls = tpu.fused_cumulant, tpu.fused_cumulant_backward
        options: dict[str, Any] = {"reduction_is_sum": False}
        rest = (mask, _array(batch, heads))
    else:
        calls = tpu.fused_linear, tpu.fused_linear_backward
        options, rest = {"normalizer_eps": 1e-6}, (mask,)
    forward_call, backward_call = calls

    def forward(query, key, value, *rest):
        return join(forward_call(features, *map(split, (query, key, value)), *rest, **options))

    def backward(query, key, value, out_bar, *rest):
        tokens = map(split, (query, key, value))
        return join(backward_call(features, *tokens, *rest, split(out_bar), **options))

    name = functools.partial(_name, batch, tokens, heads, dim, dtype, features, masked)
    return [
        Case(name("fused"), forward, (x, x, x, *rest), _bytes(x, 4)),
        Case(name("fused_backward"), backward, (x, x, x, x, *rest), _bytes(x, 7)),
    ]


def causal_cases(batch, tokens, heads, dim, dtype, features, *, key_heads: int = 0) -> list[Case]:
    """`causal_cumulant` or `causal_linear`, forward (saving its states) and backward."""
    key_heads = key_heads or heads
    x = _array(batch, tokens, heads * dim, dtype=dtype)
    y = _array(batch, tokens, key_heads * dim, dtype=dtype)
    split, split_key, join = _split(tokens, heads), _split(tokens, key_heads), _join(tokens)
    if isinstance(features, PolynomialFeatures):
        calls: Calls = tpu.causal_cumulant, tpu.causal_cumulant_backward
        options: dict[str, Any] = {"reduction_is_sum": False}
        sums = _array(batch, key_heads, features.count(dim), dim + 1)
        pivot = _array(batch, key_heads, dim)
        state = (sums, pivot, pivot, _array(batch, key_heads))
    else:
        calls = tpu.causal_linear, tpu.causal_linear_backward
        options = {"normalizer_eps": 1e-6}
        sums = _array(batch, key_heads, dim, dim + 1)
        state = (sums,)
    forward_call, backward_call = calls

    def forward(query, key, value, *state):
        arrays = split(query), split_key(key), split_key(value)
        return join(forward_call(features, *arrays, None, *state, save_states=True, **options))

    def backward(query, key, value, out_bar, sums_bar, states, *state):
        arrays = split(query), split_key(key), split_key(value)
        bars = split(out_bar), sums_bar
        return join(backward_call(features, *arrays, None, *state, states, *bars, **options))

    arguments = (x, y, y, *state)
    states = jax.eval_shape(forward, *arguments)[2]
    name = functools.partial(_name, batch, tokens, heads, dim, dtype, features, False)
    suffix = f" key_heads={key_heads}" if key_heads != heads else ""
    return [
        Case(name("causal") + suffix, forward, arguments, _bytes(x, 2) + _bytes(y, 2)),
        Case(
            name("causal_backward") + suffix,
            backward,
            (x, y, y, x, sums, states, *state),
            _bytes(x, 3) + _bytes(y, 4),
        ),
    ]


def token_statistics_cases(batch, tokens, heads, dim, dtype, *, masked: bool = False) -> list[Case]:
    """`token_statistics`, forward and backward."""
    x, temperature = _array(batch, tokens, heads * dim, dtype=dtype), _array(heads)
    mask = _array(batch, tokens, dtype=bool) if masked else None
    split, join = _split(tokens, heads), _join(tokens)

    def forward(w, temperature, mask):
        return join(tpu.token_statistics(split(w), temperature, mask))

    def backward(w, temperature, mask, sums, out_bar):
        return join(
            tpu.token_statistics_backward(split(w), temperature, mask, sums, split(out_bar))
        )

    arguments = x, temperature, mask
    sums = jax.eval_shape(forward, *arguments)[1]
    name = functools.partial(_name, batch, tokens, heads, dim, dtype, None, masked)
    return [
        Case(name("token_statistics"), forward, arguments, _bytes(x, 2)),
        Case(name("token_statistics_backward"), backward, (*arguments, sums, x), _bytes(x, 3)),
    ]


def causal_token_statistics_cases(
    batch, tokens, heads, dim, dtype, *, masked: bool = False
) -> list[Case]:
    """`causal_token_statistics` with a bias, forward (saving its states) and backward."""
    x, temperature = _array(batch, tokens, heads * dim, dtype=dtype), _array(heads)
    mask = _array(batch, tokens, dtype=bool) if masked else None
    bias = _array(heads, tokens)
    state = _array(batch, heads, dim), _array(batch, heads, dim), _array(batch, heads)
    split, join = _split(tokens, heads), _join(tokens)

    def forward(w, temperature, mask, bias, state):
        return join(
            tpu.causal_token_statistics(split(w), temperature, mask, bias, state, save_states=True)
        )

    def backward(w, temperature, mask, bias, states, out_bar, state_bar):
        return join(
            tpu.causal_token_statistics_backward(
                split(w), temperature, mask, bias, states, split(out_bar), state_bar
            )
        )

    arguments = x, temperature, mask, bias, state
    states = jax.eval_shape(forward, *arguments)[2]
    name = functools.partial(_name, batch, tokens, heads, dim, dtype, None, masked)
    return [
        Case(name("causal_token_statistics"), forward, arguments, _bytes(x, 2)),
        Case(
            name("causal_token_statistics_backward"),
            backward,
            (*arguments[:-1], states, x, state),
            _bytes(x, 3),
        ),
    ]


def _array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _bytes(x: jax.ShapeDtypeStruct, times: int) -> int:
    return times * x.size * x.dtype.itemsize


def _split(tokens: int, heads: int):
    return lambda x: x.reshape(x.shape[0], tokens, heads, -1)


def _join(tokens: int):
    """Joins heads and dims again in every array that has tokens."""

    def join(x):
        return x.reshape(*x.shape[:2], -1) if x.ndim == 4 and x.shape[1] == tokens else x

    return functools.partial(jax.tree.map, join)


def _name(batch, tokens, heads, dim, dtype, features, masked, kernel) -> str:
    kind = ""
    if features is not None:
        kind = f" order={features.order}" if isinstance(features, PolynomialFeatures) else " elu1"
    shape = f"{batch}x{tokens}x{heads}x{dim}"
    return f"{kernel} {shape} {dtype}{kind}{' masked' if masked else ''}"
