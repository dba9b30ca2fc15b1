"""A table of what a model holds and computes: parameters, operations, tokens."""

import dataclasses
import math
from typing import Any

from flax import nnx

from cumulant_jax.models import registry
from cumulant_jax.models.operations import Operations, count_operations
from cumulant_jax.naming import unknown_name

#: What no other row names: norms, LayerScale, residual sums, tokens of the model's own.
_REST = "rest"


@dataclasses.dataclass(frozen=True)
class SummaryRow:
    """One kind of layer, over the whole model.

    Attributes:
      name: its name in the model, such as "attention".
      parameters: number of parameters.
      operations: what it computes for one example, forward.
    """

    name: str
    parameters: int
    operations: Operations


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a model holds and computes; `print` it for a table.

    Attributes:
      model: the model's name, or its class.
      input_shape: shape of one example.
      tokens: tokens that the first block sees.
      rows: kinds of layers, in the order of the model, the rest last.
    """

    model: str
    input_shape: tuple[int, ...]
    tokens: int
    rows: tuple[SummaryRow, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def operations(self) -> Operations:
        """What the model computes for one example, forward."""
        return sum((row.operations for row in self.rows), Operations())

    @property
    def macs(self) -> int:
        """Multiply-adds of matrix products and convolutions: what papers often call FLOPs."""
        return self.operations.macs

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 for a multiply-add, 1 for an entry of anything else."""
        return self.operations.flops

    def __str__(self) -> str:
        """The table."""
        total = SummaryRow("total", self.parameters, self.operations)
        cells = [("layer", "parameters", "MACs", "FLOPs")]
        cells += [
            (
                row.name,
                f"{row.parameters:,}",
                f"{row.operations.macs:,}",
                f"{row.operations.flops:,}",
            )
            for row in (*self.rows, total)
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            f"{line[0]:<{widths[0]}}"
            + "".join(
                f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)
            )
            for line in cells
        ]
        rule = "-" * len(lines[0])
        size = " x ".join(map(str, self.input_shape))
        head = f"{self.model} on one example of {size}, {self.tokens} tokens"
        return "\n".join([head, lines[0], rule, *lines[1:-1], rule, lines[-1]])


def summary(model: str | nnx.Module, **options: Any) -> Summary:
    """Summarises a model: parameters, operations of one forward pass, tokens, by kind of layer.

    Operations are counted in the traced program, with loops as often as they run (see
    `operations.count_operations`); nothing is compiled or run, and no parameter is made. `macs` are
    the multiply-adds of matrix products and convolutions, `flops` twice these and one for each
    entry of all other arithmetic. They are those of evaluation, for one example.

    Args:
      model: a name of `list_models()`, or a model.
      **options: override the model's own, such as image_size=448 or attention="cumulant3".

    Returns:
      A record with the totals and a row for each kind of layer; `print` shows it as a table.

    Raises:
      ValueError: an unknown name or option.
      TypeError: neither a name nor a model of this library.
      NotImplementedError: the program cannot be counted: it has a kernel that JAX cannot look into.

    >>> print(summary("tost_tiny_12_p16", image_size=384))
    tost_tiny_12_p16 on one example of 384 x 384 x 3, 576 tokens
    layer            parameters           MACs          FLOPs
    ---------------------------------------------------------
    patch_embedding     219,096    310,542,336    633,803,832
    positions            12,480      7,077,888     14,376,960
    attention           889,392    509,607,936  1,035,348,528
    mlp               3,550,464  2,038,431,744  4,110,041,088
    class_blocks        890,496     86,262,528    177,225,672
    head                193,000        192,000        385,000
    rest                 14,400              0     26,598,916
    ---------------------------------------------------------
    total             5,769,328  2,952,114,432  5,997,779,996
    """
    name = model if isinstance(model, str) else type(model).__name__
    abstract: Any = _abstract(model, options)
    graphdef, state = nnx.split(abstract)
    example = abstract.options.example

    def call(state: Any, example: Any) -> Any:
        return nnx.merge(graphdef, state)(example)

    counts = count_operations(call, state, example)
    parameters = _parameters(state)
    names = [scope for scope in counts if scope in parameters]
    rows = [SummaryRow(row, parameters.get(row, 0), counts[row]) for row in names]
    rest = SummaryRow(
        _REST,
        sum(count for row, count in parameters.items() if row not in names),
        sum((count for scope, count in counts.items() if scope not in names), Operations()),
    )
    return Summary(name, tuple(example.shape[1:]), abstract.options.tokens, (*rows, rest))


def _abstract(model: Any, options: dict[str, Any]) -> nnx.Module:
    """The model with other options, its parameters shapes alone."""
    if isinstance(model, str):
        return nnx.eval_shape(lambda: registry.create(model, rngs=nnx.Rngs(0), **options))
    record = getattr(model, "options", None)
    if not isinstance(model, nnx.Module) or not hasattr(record, "example"):
        raise TypeError(
            "model must be a name of cumulant_jax.models.list_models() or a model of "
            f"cumulant_jax.models, got {type(model).__name__}"
        )
    known = [field.name for field in dataclasses.fields(record)]  # pyright: ignore
    for option in options:
        if option not in known:
            raise ValueError(unknown_name(f"option of {type(model).__name__}", option, known))
    build: Any = type(model)
    record = dataclasses.replace(record, **options)  # pyright: ignore
    return nnx.eval_shape(lambda: build(record, rngs=nnx.Rngs(0)))


def _parameters(state: Any) -> dict[str, int]:
    """Parameters by the layer's name: the first in the path that is not a list or an index."""
    counts: dict[str, int] = {}
    for path, leaf in nnx.to_flat_state(nnx.filter_state(state, nnx.Param)):
        layers = [part for part in path if isinstance(part, str) and part != "blocks"]
        counts[layers[0]] = counts.get(layers[0], 0) + math.prod(leaf.shape)
    return counts
