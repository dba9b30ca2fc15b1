"""How each attention kind is named and drawn, the same in every figure and table.

The colours keep a contrast of 3:1 or more on both white and the report's dark background, and the
five kinds of the standard comparison stay apart under the common forms of colour blindness;
markers and dashes carry the same distinction without colour.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class KindStyle:
    """How one attention kind looks.

    Attributes:
      label: the name for readers.
      color: "#rrggbb".
      marker: Matplotlib's marker code.
      dashes: on and off lengths in line widths; () is a solid line.
    """

    label: str
    color: str
    marker: str
    dashes: tuple[float, ...] = ()


KIND_STYLES: dict[str, KindStyle] = {
    "softmax": KindStyle("softmax", "#737678", "o"),
    "linear": KindStyle("linear", "#ce7804", "s", (5, 1.6)),
    "cumulant1": KindStyle("cumulant, order 1", "#8f8a3c", "1", (1, 1)),
    "cumulant2": KindStyle("cumulant, order 2", "#1c67dc", "^", (3, 1.2)),
    "cumulant3": KindStyle("cumulant, order 3", "#da1536", "D"),
    "cumulant3_full": KindStyle("cumulant, order 3 full", "#b8508f", "v", (6, 1.5, 1, 1.5)),
    "cumulant4": KindStyle("cumulant, order 4", "#8a6bd1", "P", (4, 1)),
    "tssa": KindStyle("token statistics (ToST)", "#23a363", "X", (1.5, 1.2)),
    "xca": KindStyle("cross-covariance (XCiT)", "#a0693a", "*", (2, 2)),
    "mssa": KindStyle("shared-projection softmax (CRATE)", "#3f8fa8", "p", (4, 2, 1, 2)),
}

_OTHERS = (
    ("#c06c84", "h", (2, 1)),
    ("#4f9d69", "<", (5, 2)),
    ("#6c7fd8", ">", (1, 2)),
)


def kind_style(kind: str, *, position: int = 0) -> KindStyle:
    """Returns the style of an attention kind; a kind of the user's own gets a spare one.

    Args:
      kind: the kind's name.
      position: which of the spare styles a kind without one of its own gets.

    >>> kind_style("cumulant2").label
    'cumulant, order 2'
    >>> kind_style("mine").label
    'mine'
    """
    known = KIND_STYLES.get(kind)
    if known is not None:
        return known
    color, marker, dashes = _OTHERS[position % len(_OTHERS)]
    return KindStyle(kind, color, marker, dashes)
