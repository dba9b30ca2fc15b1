"""Counts what a program computes, from its jaxpr: nothing is compiled or run."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

#: Elementwise arithmetic: one operation for each entry of the result.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "atan2", "cbrt", "cos", "cosh", "cumlogsumexp", "cummax", "cummin",
    "cumprod", "cumsum", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "integer_pow",
    "lgamma", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "rem", "rsqrt", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh",
))
#: Reductions: one operation for each entry of what is reduced.
_REDUCTIONS = frozenset((
    "argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum",
))
# fmt: on


@dataclasses.dataclass(frozen=True)
class Operations:
    """What a part of a program computes.

    Attributes:
      macs: multiply-adds of matrix products and convolutions.
      elementwise: entries of elementwise arithmetic and reductions over floating-point numbers.
    """

    macs: int = 0
    elementwise: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations: two for a multiply-add, one for everything else."""
        return 2 * self.macs + self.elementwise

    def __add__(self, other: "Operations") -> "Operations":
        """The operations of both."""
        return Operations(self.macs + other.macs, self.elementwise + other.elementwise)

    def __mul__(self, times: int) -> "Operations":
        """The operations of a part that runs several times."""
        return Operations(times * self.macs, times * self.elementwise)


def count_operations(function: Callable[..., Any], *args: Any) -> dict[str, Operations]:
    """Counts the operations of a function by the outermost `jax.named_scope` around them.

    A loop of known length counts as often as it runs, and the larger branch of a condition counts.
    A multiply-add is counted for each product in the definition of a matrix product or convolution,
    those with padding included. Comparisons, copies and conversions count nothing.

    Args:
      function: of `args`.
      *args: arrays, or their shapes and types; pytrees of these.

    Returns:
      Operations by the name of the scope, "" outside of all.

    Raises:
      NotImplementedError: the program has a loop of unknown length, or a kernel that JAX cannot
        look into.

    >>> x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> count_operations(lambda x: x @ x.T + 1.0, x)
    {'': Operations(macs=128, elementwise=16)}
    """
    counts: dict[str, Operations] = collections.defaultdict(Operations)
    for equation, scope, times in _equations(jax.make_jaxpr(function)(*args).jaxpr, "", 1):
        counts[scope] += _of_equation(equation) * times
    return dict(counts)


def _equations(jaxpr: Any, scope: str, times: int) -> Iterator[tuple[Any, str, int]]:
    """Every equation that holds no others, with its scope and how often it runs."""
    for equation in jaxpr.eqns:
        own = scope or _outermost_scope(equation)
        name, params = equation.primitive.name, equation.params
        if name == "while":
            raise NotImplementedError("cannot count a loop of unknown length (lax.while_loop)")
        if "mosaic" in name or name == "pallas_call" or "custom_call" in name:
            raise NotImplementedError(
                f"cannot count what a kernel ({name}) computes; give the attention the option "
                "implementation='xla'"
            )
        if name == "cond":
            branches = [list(_equations(b.jaxpr, own, times)) for b in params["branches"]]
            yield from max(branches, key=_total)
            continue
        inner = list(_inner_jaxprs(params)) if name not in _REDUCTIONS else []
        repeats = times * params["length"] if name == "scan" else times
        for part in inner:
            yield from _equations(part, own, repeats)
        if not inner:
            yield equation, own, times


def _total(equations: list[tuple[Any, str, int]]) -> int:
    return sum((_of_equation(equation) * times).flops for equation, _, times in equations)


def _outermost_scope(equation: Any) -> str:
    names = (part.name for part in equation.source_info.name_stack.stack)
    return next(names, "")


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _of_equation(equation: Any) -> Operations:
    name, result = equation.primitive.name, equation.outvars[0].aval
    if name == "dot_general":
        return Operations(macs=_dot_macs(equation))
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return Operations(macs=math.prod(result.shape) * math.prod(kernel) // out_features)
    operands = [operand.aval for operand in equation.invars]
    if not operands or not jnp.issubdtype(operands[0].dtype, jnp.floating):
        return Operations()
    if name in _ELEMENTWISE:
        return Operations(elementwise=math.prod(result.shape))
    if name in _REDUCTIONS:
        return Operations(elementwise=math.prod(operands[0].shape))
    return Operations()


def _dot_macs(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
