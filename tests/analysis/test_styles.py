"""The palette, measured: contrast by WCAG 2, colour blindness by Machado and others (2009)."""

import itertools
import re

import numpy as np
import pytest

from cumulant_jax.analysis import KIND_STYLES, kind_style
from cumulant_jax.analysis.report import _resource

STANDARD = ("softmax", "linear", "cumulant2", "cumulant3", "tssa")
VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear_rgb(color):
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def luminance(color):
    return linear_rgb(color) @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(matrix) @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", [*KIND_STYLES, "first of one's own", "second of one's own"])
def test_every_colour_stands_out_on_light_and_dark(kind):
    papers = re.findall(r"--paper: (#[0-9a-f]{6})", _resource("report.css"))
    assert len(papers) == 2
    style = kind_style(kind, position=len(kind))
    assert all(contrast(style.color, paper) >= 3 for paper in papers)


@pytest.mark.parametrize("vision", VISION)
def test_the_standard_kinds_stay_apart_for_everyone(vision):
    seen = {kind: lab(VISION[vision] @ linear_rgb(KIND_STYLES[kind].color)) for kind in STANDARD}
    for one, other in itertools.combinations(STANDARD, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)


def test_no_two_kinds_share_marker_and_dashes():
    assert len({style.marker for style in KIND_STYLES.values()}) == len(KIND_STYLES)
    assert len({style.color for style in KIND_STYLES.values()}) == len(KIND_STYLES)


def test_kinds_of_ones_own_get_different_styles():
    own = [kind_style(f"own{i}", position=i) for i in range(3)]
    assert len({style.color for style in own}) == 3
    assert [style.label for style in own] == ["own0", "own1", "own2"]
