"""Several processes that train together: how they find each other, and how they agree."""

import dataclasses
import os
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

# How long the others wait for a process that says nothing before they stop, and the first ones for
# the last when all are done.
_HEARTBEAT_SECONDS = 60
_SHUTDOWN_SECONDS = 60

#: What JAX is to find out by itself, as on the hosts of a TPU pod.
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessFlags:
    """Where a process stands among those that train together; see `start_processes`.

    Attributes:
      coordinator: HOST:PORT at which process 0 waits for the others, or "auto".
      num_processes: how many there are.
      process_id: the number of this one, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        """Checks that all are given, or none, and that they fit each other."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        flags = {name: f"--{name.replace('_', '-')}" for name in given}
        missing = [flags[name] for name, value in given.items() if value is None]
        alone = len(missing) == len(given)
        if alone or (self.coordinator == AUTO and len(missing) == len(given) - 1):
            return
        if missing:
            raise ValueError(
                f"{' and '.join(missing)}: missing; several processes need "
                f"{', '.join(flags.values())}, or none of them where SLURM, Open MPI or a TPU pod "
                "starts them."
            )
        count, index = self.num_processes or 0, self.process_id or 0
        if count < 1:
            raise ValueError(f"--num-processes: got {count}, expected at least 1.")
        if not 0 <= index < count:
            raise ValueError(f"--process-id: got {index}, expected 0 to {count - 1}.")
        host, _, port = (self.coordinator or "").rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--coordinator: got {self.coordinator!r}, expected HOST:PORT.")


def start_processes(flags: ProcessFlags | None = None) -> bool:
    """Joins the processes that train together; call it before anything else of JAX.

    Who they are is told by the flags, else by what started them: SLURM (`srun`), Open MPI
    (`mpirun`), or Kubernetes for a TPU pod. A process that was started alone stays alone.

    Args:
      flags: what the command line says.

    Returns:
      Whether it joined others.

    Raises:
      RuntimeError: the others cannot be reached.

    >>> start_processes()
    False
    """
    flags = flags or ProcessFlags()
    if flags.coordinator is None and not _started_with_others(os.environ):
        return False
    jax.distributed.initialize(
        None if flags.coordinator == AUTO else flags.coordinator,
        flags.num_processes,
        flags.process_id,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    return True


def is_first() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns once every process has come here; `name` is the same in all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_agree(value: bool) -> bool:
    """Whether every process says True; each must ask.

    >>> all_agree(True)
    True
    """
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def _started_with_others(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that JAX knows started several processes."""

    def above_one(name: str) -> bool:
        return environment.get(name, "").isdecimal() and int(environment[name]) > 1

    # Of SLURM the step's: in a job of many tasks, a command without srun is alone.
    launchers = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return any(map(above_one, launchers)) or len(hosts) > 1
