"""Markdown of compiled kernels, and its place in a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cumulant_jax.analysis.kernel_benchmark import KernelCase
from cumulant_jax.analysis.kernel_report import KernelRow, predict
from cumulant_jax.costs.chips import Chip

BEGIN = "<!-- inspect-kernels: begin -->"
END = "<!-- inspect-kernels: end -->"

Column = tuple[str, Callable[[KernelRow], str]]

_FIRST: tuple[Column, ...] = (
    ("operation", lambda row: row.operation),
    ("shape", lambda row: f"{row.batch}×{row.tokens}×{row.heads}×{row.dim}"),
    ("kernel", lambda row: row.kernel + " (saves)" * _saves(row)),
    ("grid", lambda row: row.grid),
)
_GPU: tuple[Column, ...] = (
    ("registers", lambda row: str(row.registers)),
    ("spills", lambda row: str(row.spills)),
    ("shared KB", lambda row: f"{row.memory_bytes / 1024:.0f}"),
    ("blocks", lambda row: str(row.blocks_per_core)),
    ("occupancy %", lambda row: f"{100 * (row.occupancy or 0):.0f}"),
    ("wgmma", lambda row: str(row.wgmma)),
    ("TMA", lambda row: str(row.tma)),
)
_TPU: tuple[Column, ...] = (
    ("VMEM MB", lambda row: f"{row.memory_bytes / 2**20:.1f}"),
    ("bundles", lambda row: str(row.bundles)),
    ("spills", lambda row: str(row.spills)),
)
_LAST: tuple[Column, ...] = (
    ("MB", lambda row: f"{row.bytes / 1e6:.1f}"),
    ("moved MB", lambda row: f"{row.moved_bytes / 1e6:.1f}"),
    ("GFLOP", lambda row: f"{row.flops / 1e9:.2f}"),
    ("FLOP/byte", lambda row: f"{row.intensity:.0f}"),
    ("µs", lambda row: f"{row.microseconds:.1f}"),
    ("floor %", lambda row: f"{100 * row.floor_share:.0f}"),
)
_TEXT_COLUMNS = ("operation", "shape", "dtype", "kernel", "grid")


def _saves(row: KernelRow) -> bool:
    return row.program == "training" and not row.kernel.endswith("backward")


def kernel_table(chip: Chip, rows: Sequence[KernelRow]) -> list[str]:
    """Lines of a table with one row per kernel.

    Args:
      chip: what all rows are compiled for.
      rows: the kernels.
    """
    columns = (*_FIRST, *(_GPU if chip.platform == "gpu" else _TPU), *_LAST)
    cells = [[text(row) for _, text in columns] for row in rows]
    return _table([name for name, _ in columns], cells)


def operation_table(
    chips: Sequence[Chip], cases: Sequence[KernelCase], rows: Sequence[KernelRow]
) -> list[str]:
    """Lines of a table with one row per case: predicted share of the memory floor on each chip.

    A cell holds the forward pass and forward and backward together; "xla" stands where no kernel
    serves the case.
    """
    by_case: dict[tuple, list[KernelRow]] = {}
    for row in rows:
        key = (row.chip, row.operation, row.batch, row.tokens, row.heads, row.dim, row.dtype)
        by_case.setdefault(key, []).append(row)

    def cell(chip: Chip, case: KernelCase) -> str:
        key = (chip.name, case.name, case.batch, case.tokens, case.heads, case.dim, case.dtype)
        if key not in by_case:
            return "xla"
        shares = [
            predict(chip, case, by_case[key], program).floor_share
            for program in ("forward", "training")
        ]
        return " / ".join(f"{100 * share:.0f}" for share in shares)

    head = ["operation", "shape", "dtype", "FLOP/byte", *(f"{chip.label} %" for chip in chips)]
    cells = [
        [
            case.name,
            f"{case.batch}×{case.tokens}×{case.heads}×{case.dim}",
            case.dtype,
            f"{case.flops(backward=False) / case.bytes(backward=False):.0f}",
            *(cell(chip, case) for chip in chips),
        ]
        for case in cases
    ]
    return _table(head, cells)


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if name in _TEXT_COLUMNS else "---:" for name in head]
    return [*(f"| {' | '.join(line)} |" for line in (head, rule, *cells)), ""]


def report(
    chips: Sequence[Chip],
    cases: Sequence[KernelCase],
    rows: Sequence[KernelRow],
    *,
    in_detail: Sequence[str],
    versions: Mapping[str, str],
    command: str,
    date: str,
) -> list[str]:
    """Lines of the whole report.

    Args:
      chips: what was compiled for.
      cases: what was compiled.
      rows: the kernels.
      in_detail: operations whose kernels are listed, in bfloat16.
      versions: of the compilers.
      command: that made the report.
      date: when.
    """
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"Made by `{command}` on {date} with {made_with}.", ""]
    lines += ["### Operations: predicted share of the memory floor", ""]
    lines += operation_table(chips, cases, rows)
    for chip in chips:
        chosen = [
            row
            for row in rows
            if row.chip == chip.name and row.operation in in_detail and row.dtype == "bfloat16"
        ]
        lines += [f"### Kernels on {chip.label}", "", *kernel_table(chip, chosen)]
    return lines


def put_between_markers(document: str, lines: Sequence[str]) -> str:
    r"""The document with what stands between the markers replaced.

    Raises:
      ValueError: it lacks the markers, or has them in the wrong order.

    >>> put_between_markers(f"a\n{BEGIN}\nold\n{END}\nb\n", ["new"]).splitlines()[1:4]
    ['<!-- inspect-kernels: begin -->', 'new', '<!-- inspect-kernels: end -->']
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document must have the lines {BEGIN} and {END}, in this order.")
    return "".join([before, begin, "\n", "\n".join(lines).strip("\n"), "\n", end, after])
