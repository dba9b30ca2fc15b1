"""The figure of time against tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cumulant_jax.analysis.attention_cost import DOT_PRODUCT, Cost
from cumulant_jax.analysis.styles import KindStyle, kind_style

_DOT_PRODUCT_STYLE = KindStyle(DOT_PRODUCT, "#222222", "o", (2, 1))


def plot_costs(costs: Sequence[Cost], path: Path) -> None:
    """Draws time against tokens per kind, both axes logarithmic, into a PNG.

    Args:
      costs: from `attention_cost.measure`.
      path: the file to write.
    """
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for kind in dict.fromkeys(cost.kind for cost in costs):
        points = sorted((c.tokens, 1e3 * c.seconds) for c in costs if c.kind == kind)
        style = _DOT_PRODUCT_STYLE if kind == DOT_PRODUCT else kind_style(kind)
        axes.plot(
            *zip(*points, strict=True),
            label=style.label,
            color=style.color,
            marker=style.marker,
            markersize=5,
            dashes=style.dashes or (None, None),
        )
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward + backward, ms")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
