"""What a compiled training step costs on a chip: memory, arithmetic, communication, and the time
that follows from published figures.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from cumulant_jax.costs.chips import Chip
from cumulant_jax.costs.collectives import Collective

#: The share of a chip's memory that a program may take: the rest is the runtime's.
USABLE_MEMORY = 0.92


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """A training step on one mesh, as its compiler sees it, and the time that follows.

    Attributes:
      mesh: as in a config, with all sizes.
      devices: in all.
      batch_size: over all devices.
      memory_bytes: on each device: state, batch, activations and code; None where the compiler gave
        up, which is where it does not fit.
      fits: whether that is within the chip's memory.
      flops: of a step in all products, over all devices; what is recomputed counts.
      traffic_bytes: that each device reads and writes in its memory, where the compiler tells.
      sent: for each kind of exchange how many a step has, and the bytes that each device sends.
      compute_seconds: of the products at the chip's published peak.
      traffic_seconds: of the traffic at its published bandwidth.
      sent_seconds: of what is sent, over links inside a host and the network between hosts.
      compile_seconds: the compiler's time.
    """

    mesh: str
    devices: int
    batch_size: int
    memory_bytes: float | None
    fits: bool
    flops: float
    traffic_bytes: float | None
    sent: Mapping[str, tuple[int, int]]
    compute_seconds: float
    traffic_seconds: float
    sent_seconds: float
    compile_seconds: float

    @property
    def sent_bytes(self) -> int:
        """What each device sends in a step."""
        return sum(size for _, size in self.sent.values())

    @property
    def exchanges(self) -> int:
        """How many exchanges a step has."""
        return sum(count for count, _ in self.sent.values())

    @property
    def fastest_seconds(self) -> float:
        """Where everything overlaps: no step can be faster."""
        return max(self.compute_seconds, self.traffic_seconds, self.sent_seconds)

    @property
    def estimated_seconds(self) -> float:
        """Where nothing that is sent overlaps with the rest; real steps lie between or above."""
        return max(self.compute_seconds, self.traffic_seconds) + self.sent_seconds

    @property
    def mfu(self) -> float:
        """Share of the chip's peak that the estimated time makes: model FLOPs utilisation."""
        return self.compute_seconds / self.estimated_seconds

    @property
    def examples_per_second(self) -> float:
        """Over all devices, at the estimated time."""
        return self.batch_size / self.estimated_seconds

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of memory traffic."""
        if not self.traffic_bytes:
            return None
        return self.flops / self.devices / self.traffic_bytes


def step_cost(
    chip: Chip,
    *,
    mesh: str,
    devices: int,
    batch_size: int,
    dtype: str,
    flops: float,
    memory_bytes: float | None,
    traffic_bytes: float | None,
    collectives: Sequence[Collective],
    compile_seconds: float,
) -> StepCost:
    """Puts together what the compiler says of a step and what the chip's maker says of the chip.

    Args:
      chip: the chip.
      mesh: as in a config, with all sizes.
      devices: in all.
      batch_size: over all devices.
      dtype: of the products' operands.
      flops: of a step, over all devices.
      memory_bytes: on each device; None where the compiler gave up for want of it.
      traffic_bytes: on each device, or None.
      collectives: of the compiled program.
      compile_seconds: the compiler's time.
    """
    fits = memory_bytes is not None and memory_bytes <= USABLE_MEMORY * chip.memory_bytes
    return StepCost(
        mesh=mesh,
        devices=devices,
        batch_size=batch_size,
        memory_bytes=memory_bytes,
        fits=fits,
        flops=flops,
        traffic_bytes=traffic_bytes,
        sent={
            kind: (
                sum(c.count for c in collectives if c.kind == kind),
                sum(c.bytes_sent for c in collectives if c.kind == kind),
            )
            for kind in sorted({c.kind for c in collectives})
        },
        compute_seconds=flops / devices / chip.matmul_flops[dtype],
        traffic_seconds=(traffic_bytes or 0.0) / chip.bandwidth,
        sent_seconds=sum(c.bytes_sent / _bandwidth(chip, c.group) for c in collectives),
        compile_seconds=compile_seconds,
    )


def best_first(costs: Iterable[StepCost]) -> list[StepCost]:
    """Sorts what fits before what does not, and by the examples per second."""
    return sorted(costs, key=lambda cost: (not cost.fits, -cost.examples_per_second))


def _bandwidth(chip: Chip, group: Sequence[int]) -> float:
    hosts = {device // chip.host_devices for device in group} if chip.host_devices else {0}
    return chip.link_bandwidth if len(hosts) == 1 else chip.network_bandwidth
