"""What a compiled program sends between devices, read from its optimised HLO."""

import dataclasses
import math
import re

import numpy as np

# Bits of an element, by the name of its type in HLO.
_BITS = re.compile(r"^(?:pred|[a-z]+?(\d+)\w*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?\S+ = (?P<shape>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"\}')
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]+\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]+)\][^{]*\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of exchange in a program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
      shape: what it results in on each device, as HLO writes it.
      size_bytes: bytes of the result on a device; of the argument for a reduce-scatter.
      group: the devices, by their place in the program, of the first group that takes part.
      count: how often it runs, where loops with a known number of turns hold it.
    """

    kind: str
    shape: str
    size_bytes: int
    group: tuple[int, ...]
    count: int = 1

    @property
    def bytes_sent(self) -> int:
        """What each device sends in all, by the algorithms that send least (rings)."""
        devices = len(self.group)
        share = {"all-reduce": 2 * (devices - 1) / devices, "collective-permute": 1.0}
        factor = share.get(self.kind, (devices - 1) / devices)
        return round(self.count * factor * self.size_bytes)


def collectives(program: str) -> list[Collective]:
    """Lists what a program sends between devices, in the order of the text.

    Args:
      program: the optimised HLO, `jax.jit(f).lower(...).compile().as_text()`.

    Returns:
      Its collectives; those among fewer than two devices are left out.

    >>> collectives('''
    ... ENTRY %main (p: f32[8]) -> f32[8] {
    ...   ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
    ... }
    ... ''')[0].bytes_sent
    48
    """
    lines_by_name, entry = _computations(program)
    found: list[Collective] = []
    if entry is not None:
        _collect(entry, 1, lines_by_name, found)
    return found


def _computations(program: str) -> tuple[dict[str, list[str]], str | None]:
    lines_by_name: dict[str, list[str]] = {}
    entry, lines = None, None
    for line in program.splitlines():
        if match := _COMPUTATION.match(line):
            lines = lines_by_name.setdefault(match["name"], [])
            entry = match["name"] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return lines_by_name, entry


def _collect(name: str, times: int, lines_by_name: dict[str, list[str]], found: list) -> None:
    for line in lines_by_name.get(name, ()):
        if (match := _COLLECTIVE.match(line)) is not None:
            collective = _read(match, times)
            if len(collective.group) > 1:
                found.append(collective)
            continue
        trips = _TRIPS.search(line)
        inside = times * (int(trips[1]) if trips else 1)
        called = _CALLED.findall(line)
        for names in _BRANCHES.findall(line):
            called += [part.strip().lstrip("%") for part in names.split(",")]
        for other in called:
            _collect(other, inside, lines_by_name, found)


def _read(match: re.Match, times: int) -> Collective:
    kind, rest = match["kind"], match["rest"]
    shapes = [(text, dims) for text, dims in _SHAPE.findall(match["shape"])]
    if match["start"] and kind in ("all-gather", "collective-permute"):
        # The result of a start: what goes in, then what comes out, then marks.
        shapes = [(text, dims) for text, dims in shapes if not (text == "u32" and not dims)]
        shapes = shapes[len(shapes) // 2 :]
    group = _group(rest)
    size = sum(_bytes(text, dims) for text, dims in shapes)
    size *= len(group) if kind == "reduce-scatter" else 1
    text = " ".join(f"{text}[{dims}]" for text, dims in shapes)
    return Collective(kind=kind, shape=text, size_bytes=size, group=group, count=times)


def _bytes(element: str, dims: str) -> int:
    match = _BITS.match(element)
    bits = int(match[1]) if match and match[1] else 8
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _group(rest: str) -> tuple[int, ...]:
    if match := _IOTA.search(rest):
        shape, sizes = (tuple(map(int, match[i].split(","))) for i in (1, 2))
        devices = np.arange(math.prod(sizes)).reshape(sizes)
        if match[3]:
            devices = devices.transpose(tuple(map(int, match[3].split(","))))
        return tuple(devices.reshape(shape)[0].ravel().tolist())
    if match := _MESH.search(rest):
        return _mesh_group(match[1], match[2])
    if match := _LISTED.search(rest):
        return tuple(map(int, match[1].strip("{}").split(",")))
    if match := _PAIR.search(rest):
        return tuple(map(int, match.groups()))
    return ()


def _mesh_group(mesh: str, axes: str) -> tuple[int, ...]:
    """The first group along axes of a mesh; `'a':(2)3` is the part of size 3 after one of 2."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    chosen = {name: (before, size) for name, before, size in _GROUP_AXIS.findall(axes)}
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    for place, (name, size) in enumerate(sizes.items()):
        before, part = chosen.get(name, ("1", "1"))
        before, part = (int(before), int(part)) if part else (1, size)
        if part < size:
            index = np.arange(size).reshape(before, part, -1)[0, :, 0]
            devices = np.take(devices, index, axis=place)
    return tuple(devices.ravel().tolist())
