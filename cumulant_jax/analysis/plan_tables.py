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


def exchanges(costs: Sequence[StepCost]) -> list[str]:
    """Lines of a table of what is sent: kinds of exchange, one row per mesh and batch size."""
    kinds = sorted({kind for cost in costs for kind in cost.sent})
    rows = [["mesh", "batch", *kinds], ["---", "---:", *["---:"] * len(kinds)]]
    for cost in costs:
        if cost.memory_bytes is not None:
            sent = [cost.sent.get(kind, (0, 0)) for kind in kinds]
            cells = [f"{count} × {size / 1e6 / max(count, 1):,.2f} MB" for count, size in sent]
            rows.append([cost.mesh, str(cost.batch_size), *cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def to_csv(costs: Sequence[StepCost]) -> str:
    """The same as CSV, with all digits."""
    out = io.StringIO()
    names = [name for name in StepCost.__dataclass_fields__ if name != "sent"]
    names += ["sent_bytes", "exchanges", "fastest_seconds", "estimated_seconds", "mfu"]
    names += ["examples_per_second", "intensity"]
    kinds = sorted({kind for cost in costs for kind in cost.sent})
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"{kind}_bytes" for kind in kinds)])
    for cost in costs:
        sizes = [cost.sent.get(kind, (0, 0))[1] for kind in kinds]
        writer.writerow([*(getattr(cost, name) for name in names), *sizes])
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
        str(cost.exchanges),
        intensity,
        f"{cost.fastest_seconds * 1e3:.1f} ms",
        f"{cost.estimated_seconds * 1e3:.1f} ms",
        f"{cost.mfu:.0%}",
        f"{cost.examples_per_second:,.0f}",
    ]
