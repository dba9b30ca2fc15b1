"""The versions and the machine that a figure was made with."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import jax

PACKAGES = ("cumulant_jax", "jax", "jaxlib", "flax", "optax", "numpy")


def describe_environment() -> dict[str, str]:
    """Returns what a reader needs to judge a timing: versions, processor, devices and the date.

    Neither the machine's name nor any path or user is among them.

    >>> describe_environment()["jax"] == jax.__version__
    True
    """
    facts = {"date": datetime.date.today().isoformat(), "Python": platform.python_version()}
    facts |= {name: version for name in PACKAGES if (version := _version(name))}
    facts["system"] = f"{platform.system()} {platform.machine()}"
    facts["processor"] = f"{_processor()}, {_usable_cores()} cores"
    if (memory := _memory_bytes()) is not None:
        facts["memory"] = f"{memory / 2**30:.0f} GiB"
    devices = jax.devices()
    facts["devices"] = f"{len(devices)} × {devices[0].device_kind}"
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
