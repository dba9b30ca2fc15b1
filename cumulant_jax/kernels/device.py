"""The device that a program is traced for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of an implementation depends on.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the maker's name, such as "NVIDIA H200" or "TPU v5e"; block sizes are tuned per kind.
      compute_capability: of an NVIDIA GPU, such as (9, 0); else None.
      interpret: run kernels in Pallas's interpreters, on the CPU, looking for races.
    """

    platform: str
    kind: str = ""
    compute_capability: tuple[int, int] | None = None
    interpret: bool = False


H100 = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
TPU_V5E = Device("tpu", "TPU v5 lite")

_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("device", default=None)


def current_device() -> Device:
    """The device that is assumed, or else the default one of this process."""
    return _assumed.get() or _default_device(jax.default_backend())


def is_device_assumed() -> bool:
    """Whether programs are traced for a device that may not be one of this process."""
    return _assumed.get() is not None


@contextlib.contextmanager
def assume_device(device: Device) -> Iterator[None]:
    """Traces for a device that this process does not have.

    For exporting a program to another platform, for compiling for a chip that is not there, and for
    tests in an interpreter. It acts on tracing: a function that was jitted before keeps its choice.

    Args:
      device: what to trace for.

    >>> with assume_device(H100):
    ...     current_device().platform
    'gpu'
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _default_device(platform: str) -> Device:
    device = jax.devices(platform)[0]
    capability = getattr(device, "compute_capability", None)
    if isinstance(capability, str):
        major, _, minor = capability.partition(".")
        capability = (int(major), int(minor or 0))
    return Device(platform, device.device_kind, capability)
