"""Plans of training runs as tables: what a step costs on each mesh, best first."""

import csv
import io
from collections.abc import Sequence

from cumulant_jax.costs.chips import Chip
from cumulant_jax.costs.step_estimate import StepCost

_HEADER = (
    "mesh",
    "batch",
    "memory / device",
    "fits",
    "TFLOPs / step",
    "sent / device",
    "exchanges",
    "FLOPs / byte",
    "fastest step",
    "estimated step",
    "MFU",
    "examples / s",
)


def to_markdown(chip: Chip, costs: Sequence[StepCost]) -> list[str]:
    """Lines of a table, one row per mesh and batch size, in the order given."""
    rows = [_HEADER, ["---", *["---:"] * (len(_HEADER) - 1)]]
    rows += [_cells(chip, cost) for cost in costs]
    return [f"| {' | '.join(row)} |" for row in rows]


def to_csv(costs: Sequence[StepCost]) -> str:
    """The same as CSV, with all digits."""
    out = io.StringIO()
    fields = list(StepCost.__dataclass_fields__)
    derived = ["fastest_seconds", "estimated_seconds", "mfu", "examples_per_second", "intensity"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*fields, *derived])
    writer.writerows([getattr(cost, name) for name in (*fields, *derived)] for cost in costs)
    return out.getvalue()


def _cells(chip: Chip, cost: StepCost) -> list[str]:
    if cost.memory_bytes is None:
        unknown = ["-"] * (len(_HEADER) - 5)
        too_much = f"over {chip.memory_bytes / 1e9:.0f} GB"
        flops = f"{cost.flops / 1e12:.3g}"
        return [cost.mesh, str(cost.batch_size), too_much, "no", flops, *unknown]
    intensity = "-" if cost.intensity is None else f"{cost.intensity:.0f}"
    return [
        cost.mesh,
        str(cost.batch_size),
        f"{cost.memory_bytes / 1e9:.2f} GB",
        "yes" if cost.fits else "no",
        f"{cost.flops / 1e12:.3g}",
        f"{cost.sent_bytes / 1e6:,.1f} MB",
        str(cost.collectives),
        intensity,
        f"{cost.fastest_seconds * 1e3:.1f} ms",
        f"{cost.estimated_seconds * 1e3:.1f} ms",
        f"{cost.mfu:.0%}",
        f"{cost.examples_per_second:,.0f}",
    ]
