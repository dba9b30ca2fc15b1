"""Which implementation of an operation runs."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping

from cumulant_jax.kernels.device import Device, current_device
from cumulant_jax.naming import unknown_name

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")

#: Forces an implementation wherever the argument of that name is None.
ENVIRONMENT_VARIABLE = "CUMULANT_JAX_IMPLEMENTATION"

_PLATFORM = {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}
_logger = logging.getLogger("cumulant_jax")

# Why an implementation cannot run an operation on a device, None where it can.
Unsupported = Callable[[Device], str | None]


def choose_implementation(
    implementation: str | None, operation: str, kernels: Mapping[str, Unsupported] | None = None
) -> str:
    """Resolves the `implementation` argument of an attention function.

    Args:
      implementation: None for the best that supports the call, or one of `IMPLEMENTATIONS`.
      operation: name of the attention function, for messages.
      kernels: for each implementation but "xla" that the operation has, what it cannot do.

    Returns:
      The name of the implementation.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation cannot do this operation.
    """
    kernels = kernels or {}
    if implementation is None:
        implementation = _forced()
    device = current_device()
    if implementation is None:
        return _best(operation, kernels, device)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
    if implementation != "xla":
        reason = _reason(implementation, kernels, device)
        if reason is not None:
            raise NotImplementedError(
                f"{operation}: implementation={implementation!r} {reason}; use None or 'xla'."
            )
    _log(operation, implementation, device.kind, "as asked")
    return implementation


def _forced() -> str | None:
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(unknown_name(ENVIRONMENT_VARIABLE, name, IMPLEMENTATIONS))
    return name


def _best(operation: str, kernels: Mapping[str, Unsupported], device: Device) -> str:
    for name in kernels:
        if _PLATFORM[name] == device.platform:
            reason = _reason(name, kernels, device)
            if reason is None:
                _log(operation, name, device.kind, "the best here")
                return name
            _log(operation, "xla", device.kind, f"{name} {reason}")
            return "xla"
    _log(operation, "xla", device.kind, "the only one here")
    return "xla"


def _reason(name: str, kernels: Mapping[str, Unsupported], device: Device) -> str | None:
    if name not in kernels:
        return "does not have this operation"
    if _PLATFORM[name] != device.platform:
        return f"runs on a {_PLATFORM[name]}, and this is a {device.platform}"
    return kernels[name](device)


@functools.lru_cache(maxsize=4096)
def _log(operation: str, implementation: str, kind: str, why: str) -> None:
    """One line at the first use of each choice."""
    _logger.info("%s: implementation %s on %s (%s)", operation, implementation, kind, why)
