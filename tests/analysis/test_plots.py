import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from cumulant_jax import analysis
from cumulant_jax.analysis import KIND_STYLES, Curve, bands, summarize


def lines_of(figure):
    """The drawn lines of the first axes: colour -> (x, y)."""
    return {line.get_color(): line.get_data() for line in figure.axes[0].lines}


@pytest.mark.parametrize("seed", range(3))
def test_bands_are_mean_and_extremes_over_seeds(seed):
    rng = np.random.default_rng(seed)
    values = rng.uniform(size=(4, 6))
    steps = tuple(range(10, 70, 10))
    (band,) = bands([Curve("linear", i, steps, tuple(row)) for i, row in enumerate(values)])
    np.testing.assert_allclose(band.mean, values.mean(0), rtol=1e-12)
    np.testing.assert_array_equal(band.low, values.min(0))
    np.testing.assert_array_equal(band.high, values.max(0))


def test_bands_take_the_steps_all_seeds_have():
    (band,) = bands([Curve("a", 0, (1, 2, 3), (0.1, 0.2, 0.3)), Curve("a", 1, (2, 3), (0.4, 0.5))])
    assert band.steps == (2, 3)
    np.testing.assert_allclose(band.mean, (0.3, 0.4))


def test_learning_curves_draw_the_means_in_percent(curves):
    drawn = lines_of(analysis.learning_curves(curves))
    steps, accuracy = drawn[KIND_STYLES["cumulant3"].color]
    np.testing.assert_array_equal(steps, (100, 200, 300))
    np.testing.assert_allclose(accuracy, (50, 90, 97.5))


def test_times_start_at_zero(results):
    (axes,) = analysis.accuracy_against_time(summarize(results)).axes
    assert axes.get_xlim()[0] == 0
    points = {bar.lines[0].get_color(): bar.lines[0].get_data() for bar in axes.containers}
    x, y = points[KIND_STYLES["softmax"].color]
    np.testing.assert_allclose((x[0], y[0]), (6.5, 96))


def test_kinds_without_a_measured_time_are_not_drawn(make_result):
    rows = summarize([make_result("linear", 0, 0.9, step_time_ms=None)])
    (axes,) = analysis.accuracy_against_time(rows).axes
    assert not axes.containers


@pytest.mark.parametrize("empty", [True, False], ids=["nothing", "results"])
def test_png_is_a_picture(tmp_path, results, curves, empty):
    figure = analysis.overview([], []) if empty else analysis.overview(curves, summarize(results))
    analysis.save_png(figure, tmp_path / "curves.png", dots_per_inch=50)
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
        assert image.size == (480, 200)
        assert len(np.unique(np.asarray(image.convert("L")))) > 10, "something is drawn"


def test_pictures_are_reproducible(tmp_path, results, curves):
    for name in ("a", "b"):
        analysis.save_png(analysis.overview(curves, summarize(results)), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    svgs = [analysis.to_svg(analysis.learning_curves(curves), prefix="p", title="t") for _ in "ab"]
    assert svgs[0] == svgs[1]


def test_svg_fits_into_a_page(curves):
    svg = analysis.to_svg(analysis.learning_curves(curves), prefix="one", title='5 < 6 & "so"')
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == '5 < 6 & "so"'
    assert root.get("width") is None
    assert len(root.get("viewBox").split()) == 4
    assert "currentColor" in svg
    assert "#1d2229" not in svg
    assert "<metadata" not in svg
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert ids
    assert len(ids) == len(set(ids))
    assert all(name.startswith("one-") for name in ids)
    for element in root.iter():
        href = element.get("{http://www.w3.org/1999/xlink}href")
        assert href is None or href.removeprefix("#") in ids


def test_no_global_state_is_touched(results):
    before = dict(mpl.rcParams)
    analysis.accuracy_against_time(summarize(results))
    assert dict(mpl.rcParams) == before
