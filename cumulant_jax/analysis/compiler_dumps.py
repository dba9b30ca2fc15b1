"""What the compilers of accelerators say about a kernel, read from the text that they dump.

NVIDIA: the PTX that Mosaic GPU makes, the report of `ptxas -v`, the line that launches the kernel.
TPU: libtpu's table of which units each instruction bundle uses, and the optimised HLO.
"""

from __future__ import annotations

import dataclasses
import re

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_MAXIMUM_THREADS = re.compile(r"^\.(?:maxntid|reqntid) (\d+)(?:, (\d+), (\d+))?", re.MULTILINE)
_DYNAMIC_SHARED = re.compile(r"dynamic_shared_memory_size (%\w+)")
_VMEM = re.compile(r'"tpu_custom_call".*"used_scoped_memory_configs":\[([^\]]*)\]')
_VMEM_SIZE = re.compile(r'"memory_space":"1"[^}]*"size":"(\d+)"')

# Instructions by what is looked for: products of a warpgroup, and bulk copies by the TMA unit.
_INSTRUCTIONS = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\."),
    "tma": re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\."),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuKernel:
    """One compiled kernel for an NVIDIA GPU.

    Attributes:
      registers: per thread.
      spill_bytes: stored and loaded because registers ran out.
      shared_bytes: per thread block.
      threads: per thread block.
      wgmma: warpgroup products in the code, loops counted once.
      tma: bulk tensor copies in the code, likewise.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    wgmma: int
    tma: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuKernel:
    """One compiled kernel for a TPU.

    Attributes:
      vmem_bytes: that it takes for itself.
      bundles: instruction bundles in the code, loops counted once.
      spills: vector registers stored to VMEM because there were too few.
      fills: vector registers loaded back.
    """

    vmem_bytes: int
    bundles: int
    spills: int
    fills: int


def read_gpu_kernel(*, ptx: str, ptxas: str, module: str) -> GpuKernel:
    """Reads the dumps of one Mosaic GPU kernel.

    Args:
      ptx: the PTX.
      ptxas: the report of `ptxas -v`.
      module: the MLIR module that launches the kernel.

    Raises:
      ValueError: a dump lacks what is looked for, as those of another release may.
    """
    stores, loads = (int(n) for n in _find(_SPILLS, ptxas, "the spills in the report of ptxas"))
    static = _STATIC_SHARED.search(ptxas)
    sizes = _find(_MAXIMUM_THREADS, ptx, "the number of threads in the PTX")
    threads = 1
    for size in sizes:
        threads *= int(size or 1)
    return GpuKernel(
        registers=int(_find(_REGISTERS, ptxas, "the registers in the report of ptxas")[0]),
        spill_bytes=stores + loads,
        shared_bytes=_dynamic_shared_bytes(module) + (int(static[1]) if static else 0),
        threads=threads,
        **{name: len(pattern.findall(ptx)) for name, pattern in _INSTRUCTIONS.items()},
    )


def _dynamic_shared_bytes(module: str) -> int:
    (name,) = _find(_DYNAMIC_SHARED, module, "the shared memory of the launch")
    constant = re.compile(rf"{re.escape(name)} = arith\.constant (\d+)")
    return int(_find(constant, module, f"the value of {name}")[0])


def read_tpu_kernel(*, utilization: str, hlo: str) -> TpuKernel:
    """Reads the dumps of one Mosaic TPU kernel.

    Args:
      utilization: libtpu's "final_hlo-static-per-bundle-utilization": the names of the units and
        how many there are of each, then a line per bundle.
      hlo: the optimised HLO of a program that is this kernel.

    Raises:
      ValueError: a dump lacks what is looked for.
    """
    lines = [line for line in utilization.splitlines() if line.strip()]
    if len(lines) < 4 or "VSTORE:SPILL" not in lines[1]:
        raise ValueError("the table of units per bundle has no heading; another libtpu made it.")
    units = [unit.strip() for unit in lines[1].split(",")]
    bundles = [[int(n) for n in line.split()] for line in lines[4:]]
    used = dict(zip(units, map(sum, zip(*bundles, strict=True)), strict=True))
    configs = _find(_VMEM, hlo, "the scoped memory in the HLO")[0]
    return TpuKernel(
        vmem_bytes=sum(map(int, _VMEM_SIZE.findall(configs))),
        bundles=len(bundles),
        spills=used["VSTORE:SPILL"],
        fills=used["VLOAD:FILL"],
    )


def _find(pattern: re.Pattern[str], text: str, what: str) -> tuple[str, ...]:
    match = pattern.search(text)
    if match is None:
        raise ValueError(f"a compiler's dump lacks {what}; another release may write it otherwise.")
    return match.groups()
