"""Durations: lengths of training given in steps, epochs or examples."""

import dataclasses
import math
import re

_UNITS = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "example": "examples",
    "examples": "examples",
}
_PATTERN = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training: `value` steps, epochs or examples.

    >>> duration = Duration.parse("40 epochs")
    >>> duration.steps(num_examples=1437, batch_size=64)
    898
    >>> Duration.parse("5000 examples").steps(num_examples=1437, batch_size=64)
    79
    >>> Duration.parse(300).steps(num_examples=1437, batch_size=64)
    300
    """

    value: float
    unit: str = "steps"

    @classmethod
    def parse(cls, text: "str | int | Duration", *, name: str = "duration") -> "Duration":
        """Reads "40 epochs", "1200 steps", "300000 examples", or a bare number of steps.

        Args:
          text: the duration; an int, or a string without a unit, counts steps.
          name: what the duration is for, used in error messages.

        Raises:
          TypeError: if `text` is neither a string nor an int.
          ValueError: if the number is negative or no unit of that name exists.
        """
        if isinstance(text, Duration):
            return text
        if isinstance(text, bool) or not isinstance(text, (str, int)):
            raise TypeError(
                f"{name}: got {text!r} ({type(text).__name__}), expected a number of steps or a "
                "string such as '40 epochs'."
            )
        match = _PATTERN.fullmatch(str(text))
        unit = _UNITS.get(match[2].lower() or "steps") if match else None
        if match is None or unit is None:
            raise ValueError(
                f"{name}: got {text!r}, expected a non-negative number and a unit: "
                "'40 epochs', '1200 steps' or '300000 examples'."
            )
        value = float(match[1])
        if not value < 2**53:
            raise ValueError(f"{name}: got {text!r}, expected a number below 2**53.")
        if unit == "steps" and not value.is_integer():
            raise ValueError(f"{name}: got {text!r}, expected a whole number of steps.")
        return cls(value, unit)

    def steps(self, *, num_examples: int, batch_size: int) -> int:
        """Returns the duration in whole steps.

        Batches may cross the end of an epoch, so an epoch need not be a whole number of steps:
        durations are rounded to the nearest step, and none but 0 is less than one step. Only
        examples round up, as "at least so many".

        Args:
          num_examples: examples of an epoch.
          batch_size: examples of a step.
        """
        if self.unit == "examples":
            return math.ceil(self.value / batch_size)
        exact = self.value * num_examples / batch_size if self.unit == "epochs" else self.value
        return max(1, round(exact)) if self.value else 0
