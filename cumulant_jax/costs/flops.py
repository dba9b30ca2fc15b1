"""Counts the arithmetic of a program in its matrix products and convolutions."""

import math
from typing import Any

import jax


def count_flops(function: Any, *arguments: Any, **keywords: Any) -> int:
    """Counts the floating-point operations of a function's products, forward and backward.

    Two for each multiply-add of `dot_general` and of a convolution, at any depth; loops count by
    their turns (those of unknown length once), of branches the largest. Elementwise work, a few
    per cent of a transformer's, is left out, as it is from published model FLOPs. What is computed
    twice, such as under `jax.checkpoint`, counts twice.

    Args:
      function: a function of arrays, jitted or not.
      *arguments: arrays or their shapes.
      **keywords: likewise.

    >>> import numpy as np
    >>> count_flops(lambda x, y: x @ y, np.ones((3, 5)), np.ones((5, 7)))
    210
    """
    return _count(jax.make_jaxpr(function)(*arguments, **keywords).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_COUNTERS.get(e.primitive.name, _inside)(e) for e in jaxpr.eqns)


def _dot_general(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracting)


def _convolution(equation: Any) -> int:
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    # The backward pass to the kernel has batches for features: divided out alike.
    groups = equation.params["batch_group_count"]
    dilation = math.prod(equation.params["lhs_dilation"])
    return 2 * out.size * (kernel.size // features) // (groups * dilation)


def _scan(equation: Any) -> int:
    return equation.params["length"] * _inside(equation)


def _branches(equation: Any) -> int:
    return max(_count(branch.jaxpr) for branch in equation.params["branches"])


def _inside(equation: Any) -> int:
    """Of what an equation calls."""
    # Rules for derivatives are not what runs.
    bodies = (value for key, value in equation.params.items() if key not in ("jvp_jaxpr_fun",))
    return sum(_count(body) for value in bodies for body in _jaxprs(value))


def _jaxprs(value: Any) -> list[Any]:
    items = value if isinstance(value, tuple | list) else [value]
    items = [getattr(item, "jaxpr", item) for item in items]
    return [item for item in items if hasattr(item, "eqns")]


_COUNTERS = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "scan": _scan,
    "cond": _branches,
}
