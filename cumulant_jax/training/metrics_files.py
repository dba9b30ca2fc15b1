"""The metrics of a run on disk: metrics.csv, metrics.jsonl and TensorBoard events."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class MetricsFiles:
    """Appends rows of metrics to the files of a run directory.

    A row has the step and any of the other columns. metrics.csv has a fixed header and empty cells,
    metrics.jsonl one object per row. The TensorBoard tags are the columns' names.
    """

    def __init__(self, directory: Path, columns: Sequence[str], *, after_step: int):
        """Opens the files for appending, without rows that a resumed run will write again.

        Args:
          directory: the run directory.
          columns: all columns besides `step`.
          after_step: the step the run starts from; rows of later steps are dropped.
        """
        # Imported here: it takes a second, and only training needs it.
        from tensorboardX import SummaryWriter

        self._columns = ("step", *columns)
        csv_file, jsonl_file = directory / "metrics.csv", directory / "metrics.jsonl"
        rows = [row for row in read_rows(jsonl_file) if row["step"] <= after_step]
        _replace_lines(jsonl_file, map(json.dumps, rows))
        _replace_lines(csv_file, [",".join(self._columns)])
        self._csv_file = csv_file.open("a", encoding="utf-8", newline="")
        self._csv = csv.DictWriter(self._csv_file, self._columns, lineterminator="\n")
        self._csv.writerows(rows)
        self._jsonl = jsonl_file.open("a", encoding="utf-8")
        self._events = SummaryWriter(
            str(directory / "tensorboard"), purge_step=after_step + 1 if after_step else None
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a row; it is in the files when this returns."""
        row = {"step": step, **values}
        line = json.dumps(row, allow_nan=False)
        self._csv.writerow(row)
        self._jsonl.write(f"{line}\n")
        self._csv_file.flush()
        self._jsonl.flush()
        for name, value in values.items():
            if "/" in name:
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes the TensorBoard events that are held back."""
        self._events.flush()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the files."""
        self._csv_file.close()
        self._jsonl.close()
        self._events.close()


class NoFiles:
    """Writes nothing: what a process has whose metrics another one writes."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""


def read_rows(file: Path) -> list[dict[str, float]]:
    """Reads metrics.jsonl; a last line that a kill cut off is left out, as is a missing file.

    Raises:
      ValueError: if any other line is no row of metrics, naming it.
    """
    if not file.is_file():
        return []
    *lines, rest = file.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None:
            raise ValueError(
                f"{file}, line {number}: got {line[:60]!r}, expected a row of metrics such as "
                '{"step": 50, …}. Correct or delete that line.'
            )
        rows.append(row)
    # A whole row whose line break is missing counts.
    row = _parse(rest)
    return rows if row is None else [*rows, row]


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_row else None


def _replace_lines(file: Path, lines) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(temporary, file)
