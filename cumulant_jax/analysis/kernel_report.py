"""Compiled kernels as rows: what the compiler made of each, and how near to the floor it can get.

The prediction: a kernel overlaps all it does, so it takes as long as the slowest of moving its
bytes at the chip's bandwidth, its matrix products at the chip's rate and, on a TPU, issuing its
instruction bundles, one per cycle and core. Launches and vector work on a GPU are not in it. The
memory floor is the time of reading every input and writing every output once.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cumulant_jax.analysis.compiler_dumps import (
    GpuKernel,
    TpuKernel,
    read_gpu_kernel,
    read_tpu_kernel,
)
from cumulant_jax.analysis.kernel_benchmark import KernelCase
from cumulant_jax.analysis.kernel_costs import Cost, Sizes, kernel_cost, predicted_seconds
from cumulant_jax.costs.chips import Chip, occupancy


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One kernel at one shape on one chip; None where a number does not exist there.

    Attributes:
      chip: its name.
      operation: such as "causal cumulant3".
      batch: batch size.
      tokens: number of tokens.
      heads: number of heads.
      dim: of a head.
      dtype: of the token arrays.
      program: "forward", or "training" for what a training step has besides or instead.
      kernel: its name.
      grid: thread blocks, or grid steps, as in "12×16".
      registers: per thread.
      spills: bytes on a GPU; on a TPU, vector registers stored to VMEM, loops counted once.
      memory_bytes: shared memory of a thread block, or VMEM.
      wgmma: warpgroup products in the code.
      tma: bulk tensor copies in the code.
      blocks_per_core: thread blocks that a multiprocessor holds.
      occupancy: share of its warps that they are.
      bundles: instruction bundles in the code, loops counted once.
      bytes: that must move.
      moved_bytes: that do, as far as the program tells.
      flops: of the products.
      intensity: FLOPs per byte that must move.
      microseconds: predicted.
      floor_share: of the memory floor in that time.
    """

    chip: str
    operation: str
    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: str
    program: str
    kernel: str
    grid: str
    registers: int | None = None
    spills: int
    memory_bytes: int
    wgmma: int | None = None
    tma: int | None = None
    blocks_per_core: int | None = None
    occupancy: float | None = None
    bundles: int | None = None
    bytes: int
    moved_bytes: int
    flops: int
    intensity: float
    microseconds: float
    floor_share: float


def case_of(record: Mapping[str, Any]) -> KernelCase:
    """The case that a record of the compiling process belongs to."""
    return KernelCase(**{f.name: record[f.name] for f in dataclasses.fields(KernelCase)})


def make_row(chip: Chip, record: Mapping[str, Any], compiled: GpuKernel | TpuKernel) -> KernelRow:
    """Joins what is known of a kernel.

    Args:
      chip: what it was compiled for.
      record: from `experiments.compile_kernels`: the fields of the case, and program, kernel, grid,
        array_bytes, moved_bytes, has_loop.
      compiled: what the compiler says.
    """
    case = case_of(record)
    sizes = Sizes.of(
        case.kind,
        batch=case.batch,
        tokens=case.tokens,
        heads=case.heads,
        dim=case.dim,
        itemsize=np.dtype(case.dtype).itemsize,
    )
    # Without a formula, what the kernel's arrays hold is all there is to say.
    cost = kernel_cost(record["kernel"], sizes) or Cost(record["array_bytes"], 0)
    moved = record["moved_bytes"] or record["array_bytes"]
    seconds = predicted_seconds(
        bytes=max(moved, cost.bytes),
        flops=cost.flops,
        bandwidth=chip.bandwidth,
        matmul_flops=chip.matmul_flops[case.dtype],
        issue_seconds=_issue_seconds(chip, record, compiled),
    )
    return KernelRow(
        chip=chip.name,
        operation=case.name,
        batch=case.batch,
        tokens=case.tokens,
        heads=case.heads,
        dim=case.dim,
        dtype=case.dtype,
        program=record["program"],
        kernel=record["kernel"],
        grid="×".join(str(n) for n in record["grid"] if n > 1) or "1",
        bytes=cost.bytes,
        moved_bytes=moved,
        flops=cost.flops,
        intensity=cost.flops / cost.bytes,
        microseconds=1e6 * seconds,
        floor_share=cost.bytes / chip.bandwidth / seconds,
        **_compiled_fields(chip, compiled),
    )


def _issue_seconds(chip: Chip, record: Mapping[str, Any], compiled: GpuKernel | TpuKernel) -> float:
    # How often a loop inside a grid step runs, the code does not tell.
    if isinstance(compiled, GpuKernel) or record["has_loop"] or chip.clock is None:
        return 0.0
    steps = math.prod(record["grid"])
    return compiled.bundles * steps / min(chip.cores, steps) / chip.clock


def _compiled_fields(chip: Chip, compiled: GpuKernel | TpuKernel) -> dict[str, Any]:
    if isinstance(compiled, TpuKernel):
        return {
            "spills": compiled.spills,
            "memory_bytes": compiled.vmem_bytes,
            "bundles": compiled.bundles,
        }
    held = occupancy(
        chip,
        registers=compiled.registers,
        shared_bytes=compiled.shared_bytes,
        threads=compiled.threads,
    )
    return {
        "registers": compiled.registers,
        "spills": compiled.spill_bytes,
        "memory_bytes": compiled.shared_bytes,
        "wgmma": compiled.wgmma,
        "tma": compiled.tma,
        "blocks_per_core": held.blocks,
        "occupancy": held.share,
    }


def read_files(platform: str, directory: Path) -> GpuKernel | TpuKernel:
    """Reads what `experiments.compile_kernels` kept of one kernel.

    Args:
      platform: "gpu" or "tpu".
      directory: where it is.
    """

    def text(name: str) -> str:
        return (directory / name).read_text(encoding="utf-8", errors="replace")

    if platform == "gpu":
        parts = {"ptx": "kernel.ptx", "ptxas": "ptxas.txt", "module": "module.mlir"}
        return read_gpu_kernel(**{argument: text(name) for argument, name in parts.items()})
    return read_tpu_kernel(utilization=text("utilization.txt"), hlo=text("program.hlo"))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A whole operation on one chip.

    Attributes:
      microseconds: of its kernels, one after the other.
      floor_share: of the memory floor in that time.
    """

    microseconds: float
    floor_share: float


def predict(chip: Chip, case: KernelCase, rows: Sequence[KernelRow], program: str) -> Prediction:
    """What the kernels of an operation come to: XLA's small arrays between them are not in it.

    Args:
      chip: where.
      case: the operation.
      rows: of this chip and case.
      program: "forward", or "training" for forward and backward.

    Raises:
      ValueError: there is no row.
    """
    kernels = {row.kernel: row for row in rows if row.program == "forward"}
    if program == "training":
        kernels |= {row.kernel: row for row in rows if row.program == "training"}
    if not kernels:
        raise ValueError(f"rows must hold a kernel of {case.name}; got none.")
    seconds = sum(row.microseconds for row in kernels.values()) / 1e6
    floor = case.bytes(backward=program == "training") / chip.bandwidth
    return Prediction(1e6 * seconds, floor / seconds)


def spilling(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The GPU kernels that ran out of registers.

    A GPU spills to memory, which costs time. A TPU spills to VMEM in slots of its bundles that the
    count of bundles has in it.
    """
    return [row for row in rows if row.registers is not None and row.spills]


def to_csv(rows: Iterable[KernelRow]) -> str:
    """The rows as CSV text with every digit."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(KernelRow)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue()
