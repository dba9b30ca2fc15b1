"""Reports of a decoding that takes a while."""

import io

import pytest

from cumulant_jax.data import DataConfig, load, progress
from cumulant_jax.data.progress import DecodingReport


class Clock:
    """A time that the test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def run(stream, seconds_per_call, calls):
    clock = Clock()
    with DecodingReport("split 'train' of tiny", stream=stream, clock=clock) as report:
        for call in range(1, calls + 1):
            clock.now += seconds_per_call
            report(10 * call, 10 * calls)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_nothing_is_shown_within_two_seconds(stream):
    assert run(stream(), 0.19, 10) == ""


def test_a_line_after_two_seconds_and_then_every_ten():
    lines = run(io.StringIO(), 1.0, 25).splitlines()
    done = [20, 120, 220]
    assert lines == [f"decoding split 'train' of tiny: {n}/250 images" for n in done]


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = run(Terminal(), 1.0, 3)
    assert "decoding split 'train' of tiny" in shown
    assert "30/30" in shown
    assert shown.endswith("\x1b[2K")


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_loading_reports_by_itself(cache, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", -1.0)
    options = {"name": "tiny", "data_dir": str(tiny.data_dir), "cache_dir": str(tmp_path)}
    config = DataConfig(cache=cache, mean=(0.5,) * 3, std=(0.5,) * 3, **options)
    load(config).source("train")
    captured = capsys.readouterr()
    assert captured.err == "decoding split 'train' of tiny: 37/37 images\n"
    assert captured.out == ""
    seen = []
    load(config, progress=lambda *counts: seen.append(counts)).source("test")
    assert seen == [(11, 11)]
    assert capsys.readouterr().err == ""
