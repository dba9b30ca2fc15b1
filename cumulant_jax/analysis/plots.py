"""Learning curves and accuracy against time, drawn with Matplotlib without a display.

Figures come as Matplotlib figures; `to_png` is for files and documents, `to_svg` for an HTML page,
whose text colour the lines and letters then take, in light and in dark.
"""

import io
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "figures need Matplotlib: pip install 'cumulant_jax[analysis]'", name=error.name
    ) from error
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cumulant_jax.analysis.styles import KindStyle, kind_style
from cumulant_jax.analysis.tables import KindSummary

# The colour of text and axes. SVGs carry it as a mark that `to_svg` turns into the page's own.
INK = "#1d2229"
_GRID_ALPHA = 0.16
_BAND_ALPHA = 0.18
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # Text stays text, which a page can scale, search and read aloud.
    "svg.fonttype": "none",
    # Names inside the file depend on its content alone: the same figure gives the same bytes.
    "svg.hashsalt": "cumulant_jax",
}


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run.

    Attributes:
      kind: the attention kind.
      seed: the run's seed.
      steps: training steps at which the model was evaluated, ascending.
      accuracies: top-1 accuracy at those steps, 0 to 1.
    """

    kind: str
    seed: int
    steps: tuple[int, ...]
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class Band:
    """The curves of one kind together: mean and extremes over seeds at the steps all seeds have."""

    kind: str
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def bands(curves: Iterable[Curve]) -> list[Band]:
    """Returns a band per kind, in the order in which the kinds first appear.

    >>> bands([Curve("linear", 0, (5, 10), (0.2, 0.5)), Curve("linear", 1, (5,), (0.4,))])
    [Band(kind='linear', steps=(5,), mean=(0.30000000000000004,), low=(0.2,), high=(0.4,))]
    """
    groups: dict[str, list[dict[int, float]]] = {}
    for curve in curves:
        points = dict(zip(curve.steps, curve.accuracies, strict=True))
        groups.setdefault(curve.kind, []).append(points)
    made = []
    for kind, runs in groups.items():
        steps = tuple(sorted(set.intersection(*(set(run) for run in runs))))
        columns = [[run[step] for run in runs] for step in steps]
        made.append(
            Band(
                kind,
                steps,
                tuple(statistics.fmean(column) for column in columns),
                tuple(min(column) for column in columns),
                tuple(max(column) for column in columns),
            )
        )
    return made


def learning_curves(curves: Sequence[Curve]) -> Figure:
    """Draws test accuracy against training steps: a line per kind, a band from worst to best seed.

    Args:
      curves: one per run; an empty list gives empty axes.

    Returns:
      A figure 4.2 by 3.6 inches, legend included.
    """
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure()
        _draw_curves(axes, curves)
        _legend(figure, [band.kind for band in bands(curves)])
        return figure


def accuracy_against_time(summaries: Sequence[KindSummary]) -> Figure:
    """Draws accuracy against the time of a training step: a point per kind, bars of one sd.

    Args:
      summaries: one per kind; an empty list gives empty axes.

    Returns:
      A figure 4.2 by 3.6 inches, legend included.
    """
    with mpl.rc_context(_SETTINGS):
        figure, axes = _figure()
        _draw_times(axes, summaries)
        _legend(figure, [row.kind for row in summaries])
        return figure


def overview(curves: Sequence[Curve], summaries: Sequence[KindSummary]) -> Figure:
    """Draws learning curves and accuracy against time side by side, under one legend."""
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_curves(left, curves)
        _draw_times(right, summaries)
        _legend(figure, [row.kind for row in summaries] or [band.kind for band in bands(curves)])
        return figure


def save_png(figure: Figure, path: str | Path, *, dots_per_inch: int = 160) -> None:
    """Writes a figure as PNG on white."""
    # No version of Matplotlib in the file: the same figure gives the same bytes.
    figure.savefig(path, format="png", dpi=dots_per_inch, metadata={"Software": None})


def to_svg(figure: Figure, *, prefix: str, title: str) -> str:
    """Returns a figure as an SVG element to stand inside an HTML page.

    Args:
      figure: the figure.
      prefix: unique in the page; put before every name inside, so that two figures do not clash.
      title: what the picture shows, in words, for those who do not see it.

    Returns:
      The `<svg>` element. Axes and letters take the page's text colour (`currentColor`), the
      background is clear, and nothing is loaded from anywhere.
    """
    out = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(_SVG_METADATA))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace(INK, "currentColor")
    # The page's width decides the size; the view box keeps the proportions.
    opening = re.sub(r'\s(width|height)="[^"]*"', "", svg[: svg.index(">")])
    opening += f' role="img" aria-label="{_attribute(title)}"'
    return opening + svg[svg.index(">") :].strip()


_SVG_METADATA = ("Creator", "Date", "Format", "Type")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _style_axes(axes: Axes) -> None:
    axes.grid(color=INK, alpha=_GRID_ALPHA, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    drawn = bands(curves)
    for position, band in enumerate(drawn):
        style = kind_style(band.kind, position=position)
        percent = [[100 * value for value in values] for values in (band.mean, band.low, band.high)]
        axes.fill_between(
            band.steps, percent[1], percent[2], color=style.color, alpha=_BAND_ALPHA, linewidth=0
        )
        axes.plot(band.steps, percent[0], **_line(style), markevery=max(1, len(band.steps) // 8))
    axes.set_title("Learning curves (band: worst to best seed)")
    axes.set_xlabel("training steps")
    axes.set_ylabel("test accuracy, %")
    _style_axes(axes)
    _zoom(axes, drawn)


def _zoom(axes: Axes, drawn: Sequence[Band]) -> None:
    """Leaves out the first steep rise, in which every kind looks alike."""
    late = [v for band in drawn for v in band.low[len(band.low) // 5 :]]
    if late:
        top = max(max(band.high) for band in drawn if band.high)
        low = 100 * max(0.0, min(late) - 0.08 * (top - min(late)))
        axes.set_ylim(low, min(100.0, 100 * top + 0.06 * (100 * top - low) + 0.1))


def _draw_times(axes: Axes, summaries: Sequence[KindSummary]) -> None:
    for position, row in enumerate(summaries):
        style = kind_style(row.kind, position=position)
        if row.step_time_ms is None:
            continue
        axes.errorbar(
            row.step_time_ms.mean,
            100 * row.accuracy.mean,
            xerr=row.step_time_ms.sd,
            yerr=None if row.accuracy.sd is None else 100 * row.accuracy.sd,
            color=style.color,
            marker=style.marker,
            markersize=8,
            capsize=3,
            linewidth=1.2,
        )
    axes.set_title("Accuracy and cost (bars: ± 1 sd)")
    axes.set_xlabel("time of a training step, ms")
    axes.set_ylabel("test accuracy, %")
    axes.margins(0.14)
    _style_axes(axes)
    if summaries:
        # From zero, so that distances are costs: twice as far to the right is twice as slow.
        axes.set_xlim(left=0)


def _line(style: KindStyle) -> dict[str, Any]:
    linestyle = (0, style.dashes) if style.dashes else "solid"
    return {
        "color": style.color,
        "linestyle": linestyle,
        "linewidth": 1.8,
        "marker": style.marker,
        "markersize": 4.5,
    }


def _legend(figure: Figure, kinds: Sequence[str]) -> None:
    styles = [kind_style(kind, position=position) for position, kind in enumerate(kinds)]
    if styles:
        handles = [Line2D([], [], label=style.label, **_line(style)) for style in styles]
        columns = min(len(styles), 3 if figure.get_figwidth() > 6 else 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
