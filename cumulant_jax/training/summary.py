"""What a run is and how it ended: two records without behaviour."""

import dataclasses
import typing
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a reporter learns when training starts.

    Attributes:
      label: a short name, such as "vit_nano2 cumulant3".
      unit: what an example is, such as "images".
      start_step: the step the run starts from; above 0 when it resumes.
      total_steps: the step at which the training is complete.
      num_train: examples of the training set.
      batch_size: examples per step.
      num_parameters: trained parameters of the model.
      num_devices: devices in the mesh.
      compile_seconds: the time it took to compile the step.
    """

    label: str
    unit: str
    start_step: int
    total_steps: int
    num_train: int
    batch_size: int
    num_parameters: int
    num_devices: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended; the content of summary.json.

    Attributes:
      steps: the steps done, over all restarts.
      completed: whether all steps of the config were done.
      final_metrics: the last evaluation, such as {"loss": …, "accuracy": …}; empty before one.
      best_metrics: the best evaluation by the task's main metric, among those whose step was
        saved as a checkpoint; the evaluations in between do not count.
      best_step: the step of the best evaluation; None before one.
      num_parameters: trained parameters of the model.
      images_per_second: examples per second of training time, over all restarts; logging is part
        of it, evaluations and checkpoints are not.
      step_time_ms: training time per step in milliseconds.
      step_memory_bytes: arguments, outputs that alias none of them, and temporaries of the
        compiled step on one device, by XLA's analysis; None where it is not available.
      compile_seconds: the time it took to compile the step.
      wall_seconds: seconds from start to end, over all restarts; what was lost is not counted.
    """

    steps: int
    completed: bool
    final_metrics: dict[str, float]
    best_metrics: dict[str, float]
    best_step: int | None
    num_parameters: int
    images_per_second: float
    step_time_ms: float
    step_memory_bytes: int | None
    compile_seconds: float
    wall_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-able content of summary.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Summary":
        """Rebuilds a summary from the content of summary.json.

        Raises:
          ValueError: if a key is missing, unknown or has a value of another type.
        """
        if not isinstance(values, dict):
            raise ValueError("expected an object of keys and values.")
        hints = typing.get_type_hints(cls)
        for name in [*hints, *values]:
            if name not in hints:
                raise ValueError(f"unknown key {name!r}.")
            if name not in values:
                raise ValueError(f"the key {name!r} is missing.")
            if not _fits(values[name], hints[name]):
                raise ValueError(f"{name}: got {values[name]!r}, expected {hints[name]}.")
        return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, float) for item in value.values())
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)
