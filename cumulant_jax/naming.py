"""Messages for names that do not exist: what came, the nearest known name, and all known names."""

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: object, known: Iterable[str], *, remedy: str = "") -> str:
    """Builds the one-line message for an unknown name.

    Args:
      what: what the name stands for, such as "attention kind".
      name: the name that came.
      known: the valid names.
      remedy: a sentence to append, such as the command that lists the names.

    Returns:
      One line that names the nearest valid name first.

    >>> unknown_name("attention kind", "cumulent3", ["softmax", "cumulant3"])
    "unknown attention kind 'cumulent3'; did you mean 'cumulant3'? Known: cumulant3, softmax."
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" did you mean {near[0]!r}?" if near else ""
    text = f"unknown {what} {name!r};{hint} Known: {', '.join(known)}."
    return f"{text} {remedy}".rstrip()
