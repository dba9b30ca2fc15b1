"""What accelerators can do, as their makers publish it, for predictions without the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cumulant_jax.naming import unknown_name

# Registers are given to a warp in units of 256, shared memory to a block in units of 128 bytes with
# 1 KiB on top for the system (CUDA C++ Programming Guide, compute capability 9.0).
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024
_THREADS_PER_WARP = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator.

    Attributes:
      name: short, as on the command line.
      label: for people.
      platform: "gpu" or "tpu".
      topology: what the compiler calls the smallest machine with this chip.
      bandwidth: bytes per second from and to its memory.
      matmul_flops: operations per second of its matrix units by the dtype of the operands, with
        float32 sums. For float32 operands: what products of nearly float32 precision cost.
      cores: multiprocessors of a GPU, TensorCores of a TPU.
      memory_bytes: its memory (HBM).
      link_bandwidth: bytes per second that it sends in a ring of neighbours, one way: over NVLink
        inside a host, over two links of a TPU's torus.
      network_bandwidth: bytes per second that it sends to another host; that of the links for TPUs,
        whose torus spans hosts.
      host_devices: of a GPU host, how many are linked; 0 for TPUs.
      device_kinds: how jax names it, in lower case and in part.
      clock: of a TPU's cores in Hz, in which its instruction bundles are counted; else None.
      registers: 32-bit registers of a multiprocessor.
      shared_bytes: shared memory of a multiprocessor.
      threads: that a multiprocessor holds at a time.
      blocks: thread blocks that it holds at a time.
      source: where the numbers are published.
    """

    name: str
    label: str
    platform: str
    topology: str
    bandwidth: float
    matmul_flops: Mapping[str, float]
    cores: int
    source: str
    memory_bytes: float
    link_bandwidth: float
    network_bandwidth: float
    host_devices: int = 0
    device_kinds: tuple[str, ...] = ()
    clock: float | None = None
    registers: int = 0
    shared_bytes: int = 0
    threads: int = 0
    blocks: int = 0


def _tpu(
    name: str,
    topology: str,
    *,
    bandwidth: float,
    flops: float,
    cores: int,
    clock: float,
    memory: float,
    ring: float,
    kinds: tuple[str, ...],
) -> Chip:
    # HIGHEST, which float32 operands are multiplied at, takes six bfloat16 passes.
    return Chip(
        name=name,
        label=f"TPU {name}",
        platform="tpu",
        topology=topology,
        bandwidth=bandwidth,
        matmul_flops={"bfloat16": flops, "float32": flops / 6},
        cores=cores,
        clock=clock,
        memory_bytes=memory,
        link_bandwidth=ring,
        network_bandwidth=ring,
        device_kinds=kinds,
        source=f"https://cloud.google.com/tpu/docs/{name}",
    )


def _hopper(name: str, *, bandwidth: float, memory: float, source: str) -> Chip:
    return Chip(
        name=name,
        label=f"{name.upper()} SXM",
        platform="gpu",
        topology="1x1",
        bandwidth=bandwidth,
        matmul_flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
        cores=132,
        registers=65536,
        shared_bytes=233472,
        threads=2048,
        blocks=32,
        memory_bytes=memory,
        # NVLink of the fourth generation, 900 GB/s both ways; one NDR adapter (400 Gb/s) per GPU.
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        host_devices=8,
        device_kinds=(f"nvidia {name}",),
        source=source,
    )


# The clocks of the TPUs are not on those pages. They are the published peak over four matrix units
# per core of 128 × 128 (v6e: 256 × 256) multiply-adds per cycle. A ring takes both links along one
# axis of the torus: a half (v5e, v6e) or a third (v4, v5p) of the published one-way bandwidth.
CHIPS = {
    chip.name: chip
    for chip in (
        _hopper(
            "h100",
            bandwidth=3.35e12,
            memory=80e9,
            source="https://resources.nvidia.com/en-us-tensor-core (dense, without sparsity)",
        ),
        _hopper(
            "h200",
            bandwidth=4.8e12,
            memory=141e9,
            source="https://www.nvidia.com/en-us/data-center/h200 (dense, without sparsity)",
        ),
        _tpu(
            "v4",
            "v4:2x2x1",
            bandwidth=1228e9,
            flops=275e12,
            cores=2,
            clock=1.05e9,
            memory=32e9,
            ring=100e9,
            kinds=("tpu v4",),
        ),
        _tpu(
            "v5e",
            "v5e:2x4",
            bandwidth=819e9,
            flops=197e12,
            cores=1,
            clock=1.5e9,
            memory=16e9,
            ring=100e9,
            kinds=("tpu v5 lite", "tpu v5e"),
        ),
        _tpu(
            "v5p",
            "v5p:2x2x1",
            bandwidth=2765e9,
            flops=459e12,
            cores=2,
            clock=1.75e9,
            memory=95e9,
            ring=200e9,
            kinds=("tpu v5p", "tpu v5"),
        ),
        _tpu(
            "v6e",
            "v6e:2x4",
            bandwidth=1640e9,
            flops=918e12,
            cores=1,
            clock=1.75e9,
            memory=32e9,
            ring=200e9,
            kinds=("tpu v6 lite", "tpu v6e"),
        ),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls by a name; None for others.

    >>> chip_of("NVIDIA H200").name, chip_of("TPU v5 lite").name, chip_of("cpu")
    ('h200', 'v5e', None)
    """
    kind = device_kind.lower()
    names = {name: chip for chip in CHIPS.values() for name in chip.device_kinds}
    # "TPU v5" is v5p and begins the name of another.
    found = [name for name in names if kind == name or kind.startswith(f"{name} ")]
    return names[max(found, key=len)] if found else None


def chip_named(name: str) -> Chip:
    """The chip of a name.

    Raises:
      ValueError: there is none of that name.

    >>> chip_named("v5e").label
    'TPU v5e'
    """
    if name not in CHIPS:
        raise ValueError(unknown_name("chip", name, CHIPS))
    return CHIPS[name]


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many thread blocks a multiprocessor holds, and the share of its warps that they are."""

    blocks: int
    share: float


def occupancy(chip: Chip, *, registers: int, shared_bytes: int, threads: int) -> Occupancy:
    """The occupancy of a GPU kernel, from what one of its thread blocks needs.

    Args:
      chip: a GPU.
      registers: per thread.
      shared_bytes: per block, static and dynamic.
      threads: per block.

    Raises:
      ValueError: the chip is no GPU.

    >>> occupancy(CHIPS["h100"], registers=168, shared_bytes=70_000, threads=128)
    Occupancy(blocks=3, share=0.1875)
    """
    if chip.platform != "gpu":
        raise ValueError(f"chip must be a GPU for an occupancy, got {chip.label}.")
    warps = -(-threads // _THREADS_PER_WARP)
    per_warp = _round_up(registers * _THREADS_PER_WARP, _REGISTER_UNIT)
    shared = _round_up(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT)
    blocks = min(
        chip.registers // per_warp // warps,
        chip.shared_bytes // shared,
        chip.threads // (warps * _THREADS_PER_WARP),
        chip.blocks,
    )
    return Occupancy(blocks, blocks * warps * _THREADS_PER_WARP / chip.threads)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
