"""One self-contained HTML page about a comparison: tables, curves, config, command and machine."""

import html
import importlib.resources
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cumulant_jax.analysis import plots, tables
from cumulant_jax.analysis.plots import Curve
from cumulant_jax.analysis.styles import kind_style
from cumulant_jax.analysis.tables import KindSummary, RunResult


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a report tells about.

    Attributes:
      title: the page's heading.
      results: the finished runs, kind by kind.
      curves: the evaluations of the finished runs.
      config: the configuration the runs share, of JSON types.
      command: the command that makes the comparison.
      environment: versions and machine, such as `describe_environment` gives.
      planned: how many runs the whole comparison has.
    """

    title: str
    results: Sequence[RunResult]
    config: Mapping[str, object]
    command: str
    planned: int
    curves: Sequence[Curve] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every planned run is among the results."""
        return len(self.results) == self.planned

    @property
    def progress(self) -> str:
        """One sentence on how far the comparison got; empty when it is complete."""
        if self.complete:
            return ""
        return (
            f"Partial: {len(self.results)} of {self.planned} runs are finished. "
            "The same command goes on where it stopped."
        )


def to_html(comparison: Comparison) -> str:
    """Returns the report as one HTML page that needs no other file and no network.

    Args:
      comparison: what to show; without any finished run the tables and figures are empty.
    """
    summaries = tables.summarize(comparison.results)
    notice = comparison.progress
    return _template("report.html").substitute(
        title=html.escape(comparison.title),
        style=_resource("report.css"),
        lead=html.escape(_lead(comparison, summaries)),
        notice=f'<p class="notice" role="status">{html.escape(notice)}</p>' if notice else "",
        results=_results(summaries),
        figures=_figures(comparison.curves, summaries),
        runs=_runs(comparison.results),
        command=html.escape(comparison.command),
        config=html.escape(json.dumps(comparison.config, indent=2, sort_keys=True)),
        environment="\n".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in comparison.environment.items()
        ),
    )


def to_markdown(comparison: Comparison) -> str:
    """Returns the results as Markdown: the table, what its columns mean, command and machine."""
    facts = ", ".join(f"{name} {value}" for name, value in comparison.environment.items())
    parts = [
        f"# {comparison.title}",
        comparison.progress,
        tables.to_markdown(tables.summarize(comparison.results)).rstrip(),
        _MEANING,
        f"```\n{comparison.command}\n```",
        f"Made with {facts}." if facts else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_MEANING = (
    "Accuracy is top-1 on the evaluation split at the end of training, as mean ± sample standard "
    "deviation over seeds; no seed was picked. Images/s and step time are of training, without "
    "compilation and evaluation. Memory is what the compiled training step takes on one device by "
    "the compiler's account: arguments, results and temporaries."
)


def _resource(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _template(name: str) -> string.Template:
    return string.Template(_resource(name))


def _lead(comparison: Comparison, summaries: Sequence[KindSummary]) -> str:
    if not summaries:
        return "No run is finished yet."
    best = max(summaries, key=lambda row: row.accuracy.mean)
    counts = sorted({len(row.seeds) for row in summaries})
    numbers = " or ".join(map(str, counts))
    runs = f"{numbers} seed{'s' * (counts[-1] > 1)} each"
    accuracy = tables.format_spread(best.accuracy, factor=100)
    kinds = "kind" if len(summaries) == 1 else "kinds"
    text = f"{len(summaries)} attention {kinds}, {runs}, on the same images in the same order."
    if len(summaries) == 1:
        return text
    return (
        f"{text} Highest mean accuracy: {kind_style(best.kind).label}, {accuracy} %. "
        "Differences within the standard deviations say little."
    )


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]], *, label: str, note: str) -> str:
    """Returns a table whose first column names the row, with a note below; cells are HTML."""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{html.escape(label)}" tabindex="0">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
        f'<p class="note">{html.escape(note)}</p>'
    )


def _name(kind: str, position: int) -> str:
    style = kind_style(kind, position=position)
    swatch = f'<span class="swatch" style="background:{style.color}" aria-hidden="true"></span>'
    return swatch + html.escape(style.label)


def _results(summaries: Sequence[KindSummary]) -> str:
    texts = list(tables.COLUMNS.values())[1:]
    rows = [
        [_name(row.kind, position), *(html.escape(text(row)) for text in texts)]
        for position, row in enumerate(summaries)
    ]
    return _table(tables.COLUMNS, rows, label="Results per attention kind", note=_MEANING)


def _runs(results: Sequence[RunResult]) -> str:
    headings = ["attention", "seed", "accuracy, %", "best, %", "steps", "images/s", "step, ms", "s"]
    rows = [
        [
            html.escape(kind_style(run.kind).label),
            str(run.seed),
            f"{100 * run.accuracy:.2f}",
            f"{100 * run.best_accuracy:.2f}",
            f"{run.steps:,}",
            _number(run.images_per_second, ",.0f"),
            _number(run.step_time_ms, ".2f"),
            f"{run.wall_seconds:,.1f}",
        ]
        for run in results
    ]
    note = "best: the highest of all evaluations during the run; s: seconds of the whole run."
    return _table(headings, rows, label="Results of every run", note=note)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _figures(curves: Sequence[Curve], summaries: Sequence[KindSummary]) -> str:
    drawn = [
        (
            plots.learning_curves(curves),
            "curves",
            f"Test accuracy over training steps. {_final(summaries)}",
            "Mean over seeds; the band spans the worst and the best seed. The axis starts where "
            "the first steep rise is over.",
        ),
        (
            plots.accuracy_against_time(summaries),
            "times",
            f"Test accuracy against the time of a training step. {_costs(summaries)}",
            "Up is more accurate, left is faster. Both at this image size: what grows with the "
            "square of the tokens costs little while they are few.",
        ),
    ]
    return "\n".join(
        f"<figure>\n{plots.to_svg(figure, prefix=prefix, title=words)}\n"
        f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
        for figure, prefix, words, caption in drawn
    )


def _final(summaries: Sequence[KindSummary]) -> str:
    parts = [
        f"{kind_style(row.kind).label} {tables.format_spread(row.accuracy, factor=100)} %"
        for row in summaries
    ]
    return f"At the end: {'; '.join(parts)}." if parts else "No run is finished yet."


def _costs(summaries: Sequence[KindSummary]) -> str:
    parts = [
        f"{kind_style(row.kind).label} {100 * row.accuracy.mean:.1f} % at "
        f"{row.step_time_ms.mean:.2f} ms"
        for row in summaries
        if row.step_time_ms is not None
    ]
    return f"{'; '.join(parts)}." if parts else "No run is finished yet."
