"""Devices that are not there, for the compilers of a chip's environment. Imports no jax by itself:
what the compilers read must be set before.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_name("h100_target_config.txt")

# The platform's name for jax.
_JAX_PLATFORM = {"gpu": "cuda", "tpu": "tpu"}


def prepare(platform: str, *, dumps: Path | None = None) -> None:
    """Sets what the compiler of a platform reads when jax is imported.

    Args:
      platform: "gpu" or "tpu".
      dumps: where the compiler writes what it makes of each kernel; None for nowhere.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    if platform == "gpu":
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        if dumps is not None:
            os.environ |= {
                "MOSAIC_GPU_DUMP_TO": str(dumps),
                "MOSAIC_GPU_DUMP_PTX": "1",
                "MOSAIC_GPU_DUMP_PTXAS": "1",
                "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",
            }
        return
    libtpu = importlib.import_module("libtpu")
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LIBRARY_PATH": libtpu.get_library_path(),
        # No chip is opened, so several compilers may run.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dumps is not None:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"


def devices(platform: str, topology: str) -> list[Any]:
    """The devices of a topology, to compile for.

    Args:
      platform: "gpu" or "tpu".
      topology: of TPUs as their compiler calls it, "v5p:8x8x4"; of GPUs "4x8", hosts times GPUs.
    """
    from jax.experimental import topologies

    name, options = topology, {}
    if platform == "gpu":
        text = CONFIG.read_text(encoding="utf-8")
        name, options = "h100", {"target_config": text, "topology": f"{topology}x1"}
    description = topologies.get_topology_desc(
        platform=_JAX_PLATFORM[platform], topology_name=name, **options
    )
    return list(description.devices)


def assumed(found: list[Any]) -> Any:
    """What `cumulant_jax.kernels.assume_device` takes, for programs on these devices."""
    from cumulant_jax.kernels import Device

    first = found[0]
    platform = "gpu" if first.platform in ("cuda", "gpu") else first.platform
    capability = getattr(first, "compute_capability", None)
    if capability is not None:
        major, minor = str(capability).split(".")
        capability = (int(major), int(minor))
    return Device(platform, first.device_kind, capability, len(found))
