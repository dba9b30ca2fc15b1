"""Parameter counts of the named models against what was published, and a list of those without."""

import itertools

import pytest
from flax import nnx

from cumulant_jax import models
from tests.models import test_registry

# The published implementation, 1000 classes. arXiv 2412.17810 prints 5.8M for tiny_12 and 22.6M for
# small_12; the 68.1M that it prints for its medium model is no configuration of that code.
EXACT = {
    "tost_tiny_12_p16": 5_769_328,
    "tost_small_12_p16": 22_589_944,
    "tost_tiny_24_p16": 10_223_008,
    "tost_small_24_p16": 40_344_664,
    "tost_medium_24_p16": 71_481_064,
    "tost_large_24_p16": 160_286_920,
    "tost_tiny_12_p8": 5_759_560,
    "tost_small_12_p8": 22_549_672,
    "tost_tiny_24_p8": 10_213_240,
    "tost_small_24_p8": 40_304_392,
    "tost_medium_24_p8": 71_408_936,
    "tost_large_24_p8": 160_123_432,
}
# In millions, with the decimals that are known. XCiT and ViT on the skeleton of ToST: the same
# implementation, where both have the same rounded count. CRATE: table 1 of arXiv 2306.01129.
MILLIONS = {
    **{
        f"{family}_{size}_p16": millions
        for family in ("xcit", "vit_cab")
        for size, millions in {
            "tiny_12": "6.659",
            "small_12": "26.14",
            "tiny_24": "12.0",
            "small_24": "47.44",
            "medium_24": "84.09",
            "large_24": "188.6",
        }.items()
    },
    "crate_tiny": "6.09",
    "crate_small": "13.12",
    "crate_base": "22.80",
    "crate_large": "77.64",
}
# Published counts that other tests hold: test_registry.py, test_language.py and test_vivit.py.
PUBLISHED_VIT = {*test_registry.PUBLISHED, *test_registry.PUBLISHED_MILLIONS}
ELSEWHERE = {
    *PUBLISHED_VIT,
    *("tost_lm_base", "tost_lm_medium", "tost_lm_large", "gpt_base"),
    *("vivit_b16x2", "vivit_b16x2_fe", "vivit_b16x2_fsa", "vivit_b16x2_fdp"),
}
# Sizes that no publication has: the stem for patches of 8 was published for ToST alone.
WITHOUT = {
    f"{family}_{size}_p8"
    for family in ("xcit", "vit_cab")
    for size in ("tiny_12", "small_12", "tiny_24", "small_24", "medium_24", "large_24")
}
SIZES = {
    "tiny": (192, 4),
    "small": (384, 8),
    "medium": (512, 8),
    "large": (768, 16),
}


def count(name):
    return models.count_parameters(nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("name", EXACT)
def test_published_counts(name):
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", MILLIONS)
def test_published_counts_in_millions(name):
    published = MILLIONS[name]
    decimals = len(published.partition(".")[2])
    assert f"{count(name) / 1e6:.{decimals}f}" == published


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_counts_without_a_publication_in_closed_form(name):
    """What the parts hold, added up by hand."""
    family, size, depth, _ = name.rsplit("_", 3)
    dim, heads = SIZES[size]
    widths = [3, dim // 4, dim // 2, dim]
    stem = sum(9 * a * b + 2 * b for a, b in itertools.pairwise(widths))
    attention = 4 * dim * dim + 4 * dim
    mlp = 8 * dim * dim + 5 * dim
    around = 2 * dim + 2 * 2 * dim  # LayerScale, norms
    block = attention + mlp + around
    temperatures = int(depth) * heads if family == "xcit" else 0
    blocks = (int(depth) + 2) * block + temperatures
    head = 1000 * dim + 1000
    assert count(name) == stem + 65 * dim + dim + blocks + 2 * dim + head


@pytest.mark.parametrize("name", [*EXACT, *MILLIONS, *sorted(WITHOUT)])
def test_a_name_without_a_patch_size_has_patches_of_16(name):
    if name.endswith("_p16"):
        assert models.options(name.removesuffix("_p16")) == models.options(name)


def test_every_name_is_accounted_for():
    """Those whose count was published and those whose count was not are all there are."""
    families = ("tost_*", "xcit_*", "vit_cab_*", "crate_*")
    names = [name for family in families for name in models.list_models(family)]
    names = [name for name in names if not name.startswith("tost_lm_")]
    aliases = {name for name in names if f"{name}_p16" in names}
    assert sorted({*EXACT, *MILLIONS, *WITHOUT} | aliases) == sorted(names)
    assert len(aliases) == 18


def test_the_names_without_a_published_count():
    """All that are left: other patches and sizes of ViT and ViViT, small models for trying, LRA."""
    published = {*EXACT, *MILLIONS, *ELSEWHERE}
    published |= {name.removesuffix("_p16") for name in published}
    left = set(models.list_models()) - published - WITHOUT
    patches = (1, 2, 4, 8, 14, 16, 32)
    expected = {f"vit_{size}{p}" for size in ("nano", "ti", "s", "b", "l") for p in patches}
    expected -= PUBLISHED_VIT
    expected |= {
        "tost_lm_nano",
        "gpt_nano",
        "gpt_medium",
        "gpt_large",
        *models.list_models("lra_*"),
    }
    expected |= set(models.list_models("vivit_*")) - ELSEWHERE
    assert sorted(left - expected) == sorted(expected - left) == []
