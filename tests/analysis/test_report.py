import dataclasses
import re
from html.parser import HTMLParser

import pytest

from cumulant_jax import analysis
from cumulant_jax.analysis import tables

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Parses a page strictly: every element closed in order; keeps elements, texts and tables."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts, self.rows = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return "".join(self.texts)

    def attributes(self, name):
        return [attrs[name] for _, attrs in self.elements if name in attrs]


@pytest.fixture
def page(comparison):
    return Page(analysis.to_html(comparison))


def test_numbers_are_those_of_the_table(page, results):
    assert page.rows[0] == list(tables.COLUMNS)
    for row, summary in zip(page.rows[1:3], tables.summarize(results), strict=True):
        assert row == [text(summary) for text in tables.COLUMNS.values()]


def test_every_run_is_listed(page, results):
    rows = [row for row in page.rows[4:] if row]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("softmax", "0", "95.00"),
        ("softmax", "1", "97.00"),
        ("cumulant, order 3", "0", "96.00"),
        ("cumulant, order 3", "1", "99.00"),
    ]


def test_the_page_loads_nothing(comparison):
    text = analysis.to_html(comparison)
    page = Page(text)
    assert not page.attributes("src")
    assert all(href.startswith("#") for href in page.attributes("xlink:href"))
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in page.elements}
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    # Names of XML namespaces are the only addresses, and are never fetched.
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


def test_the_page_is_accessible(page):
    tags = [tag for tag, _ in page.elements]
    assert ("html", {"lang": "en"}) in page.elements
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    assert "width=device-width, initial-scale=1" in page.attributes("content")
    pictures = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert len(pictures) == 2
    assert all(attrs["role"] == "img" for attrs in pictures)
    labels = [attrs["aria-label"] for attrs in pictures]
    assert "cumulant, order 3 97.5 ± 2.1 %" in labels[0]
    assert "softmax 96.0 % at 6.50 ms" in labels[1]
    headings = [attrs for tag, attrs in page.elements if tag == "th"]
    assert all(attrs.get("scope") in ("row", "col") for attrs in headings)
    # What scrolls sideways can be reached with the keyboard and has a name.
    regions = [attrs for _, attrs in page.elements if attrs.get("role") == "region"]
    assert len(regions) == 2
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in regions)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert set(page.attributes("aria-labelledby")) <= set(ids)


def test_light_and_dark(comparison):
    text = analysis.to_html(comparison)
    assert "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text


def test_everything_given_is_escaped_and_shown(page):
    assert "Attention <kinds> on digits" in page.text
    assert 'python -m experiments.compare --directory "a & b"' in page.text
    assert '"note": "<b>&amp;</b>"' in page.text
    assert "one <fast> chip" in page.text


def test_a_complete_comparison_has_no_notice(page, comparison):
    assert comparison.complete
    assert "Partial" not in page.text
    assert "Partial" not in analysis.to_markdown(comparison)


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_a_partial_report_says_so(comparison, results, finished):
    part = dataclasses.replace(comparison, results=results[:finished], curves=())
    sentence = f"Partial: {finished} of 4 runs are finished."
    assert sentence in Page(analysis.to_html(part)).text
    assert sentence in analysis.to_markdown(part)


def test_the_lead_names_the_highest_mean(page):
    assert "Highest mean accuracy: cumulant, order 3, 97.5 ± 2.1 %." in page.text
    assert "2 attention kinds, 2 seeds each" in page.text


def test_markdown_holds_table_command_and_machine(comparison, results):
    text = analysis.to_markdown(comparison)
    assert tables.to_markdown(tables.summarize(results)) in text
    assert comparison.command in text
    assert "jax 0.12.0, processor one <fast> chip" in text
