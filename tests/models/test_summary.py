"""The summary table against closed forms and published counts."""

import dataclasses

import jax
import pytest
from flax import nnx

from cumulant_jax import models

# Multiply-adds in thousands of millions at 224 pixels, measured on the published code: matrix
# products and convolutions.
PUBLISHED = {
    "tost_tiny_12_p16": 1.02,
    "tost_small_12_p16": 4.06,
    "tost_tiny_24_p16": 1.89,
    "tost_small_24_p16": 7.53,
    "tost_medium_24_p16": 13.37,
    "tost_tiny_12_p8": 3.93,
    "tost_small_12_p8": 15.67,
    "tost_tiny_24_p8": 7.4,
    "tost_small_24_p8": 29.54,
    "tost_medium_24_p8": 52.49,
    "xcit_tiny_12": 1.24,
    "xcit_small_12": 4.84,
    "xcit_tiny_24": 2.32,
    "xcit_small_24": 9.09,
    "xcit_medium_24": 16.14,
    "vit_cab_tiny_12": 1.37,
    "vit_cab_small_12": 5.1,
    "vit_cab_tiny_24": 2.59,
    "vit_cab_small_24": 9.62,
    "vit_cab_medium_24": 16.78,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if "_12" in n else [pytest.mark.slow]) for n in PUBLISHED],
)
def test_published_multiply_adds(name):
    """The published code also projects queries of all patches in its two class-attention blocks,
    and drops them; and it takes the second moments of TSSA as a matrix product, we as a sum.
    """
    options, summary = models.options(name), models.summary(name)
    theirs = summary.macs + 2 * summary.tokens * options["dim"] ** 2
    if options["attention"] == "tssa":
        theirs += options["depth"] * summary.tokens * options["dim"]
    assert theirs / 1e9 == pytest.approx(PUBLISHED[name], abs=0.005)


@pytest.mark.parametrize(("name", "size"), [("vit_ti16", 224), ("vit_s32", 384)])
def test_a_vit_in_closed_form(name, size):
    shape = models.options(name)
    dim, depth, patch = shape["dim"], shape["depth"], shape["patch_size"][0]
    patches = (size // patch) ** 2
    tokens = patches + 1
    summary = models.summary(name, image_size=size)
    rows = {row.name: row for row in summary.rows}
    assert summary.tokens == tokens
    assert rows["patch_embedding"].operations.macs == patches * patch * patch * 3 * dim
    projections, pairs = 4 * tokens * dim * dim, 2 * tokens * tokens * dim
    assert rows["attention"].operations.macs == depth * (projections + pairs)
    assert rows["mlp"].operations.macs == depth * 8 * tokens * dim * dim
    assert rows["head"].operations.macs == 1000 * dim
    assert rows["rest"].operations.macs == 0
    assert rows["attention"].parameters == depth * (4 * dim * dim + 4 * dim)
    assert rows["mlp"].parameters == depth * (8 * dim * dim + 5 * dim)
    assert rows["positions"].parameters == tokens * dim
    assert rows["head"].parameters == 1000 * dim + 1000
    assert summary.macs == sum(row.operations.macs for row in summary.rows)


@pytest.mark.parametrize("name", ["vit_ti16", "xcit_tiny_12", "crate_tiny"])
def test_flops_are_near_those_of_xla(name):
    """XLA counts an erf as the polynomial it is computed by, and no products with padding."""
    summary = models.summary(name, depth=2)
    model = nnx.eval_shape(lambda: models.create(name, depth=2, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    cost = call.lower(state, model.options.example).cost_analysis()
    assert summary.flops == pytest.approx(cost["flops"], rel=0.1)


@pytest.mark.parametrize("name", ["vit_s16", "tost_small_12_p8", "xcit_tiny_12", "crate_base"])
def test_parameters_are_all_in_the_rows(name):
    model = nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0)))
    assert models.summary(name).parameters == models.count_parameters(model)


def test_linear_time_shows():
    """Four times the tokens: four times the operations of token statistics, more of softmax."""
    growth = {}
    for kind in ("softmax", "tssa", "cumulant3"):
        small, large = (
            models.summary("vit_ti16", attention=kind, pool="mean", image_size=size)
            for size in (512, 1024)
        )
        rows = [{row.name: row.operations.macs for row in s.rows} for s in (small, large)]
        growth[kind] = rows[1]["attention"] / rows[0]["attention"]
    assert growth["softmax"] > 8
    assert growth["tssa"] == pytest.approx(4, rel=0.01)
    assert growth["cumulant3"] == pytest.approx(4, rel=0.05)


def test_a_model_gives_the_summary_of_its_name(small):
    model = models.create("vit_nano4", image_size=32, rngs=nnx.Rngs(0))
    by_model, by_name = models.summary(model), models.summary("vit_nano4", image_size=32)
    assert by_model.rows == by_name.rows
    assert (by_model.model, by_name.model) == ("ViT", "vit_nano4")
    larger = models.summary(model, image_size=64)
    assert larger.rows == models.summary("vit_nano4", image_size=64).rows
    assert larger.input_shape == (64, 64, 3)


def test_the_table_is_a_table():
    summary = models.summary("vit_nano4", image_size=32)
    head, columns, rule, *lines, _, total = str(summary).splitlines()
    assert head == "vit_nano4 on one example of 32 x 32 x 3, 65 tokens"
    assert columns.split() == ["layer", "parameters", "MACs", "FLOPs"]
    assert {len(line) for line in (columns, rule, *lines, total)} == {len(rule)}
    assert [line.split()[0] for line in lines] == [row.name for row in summary.rows]
    numbers = [int(cell.replace(",", "")) for cell in total.split()[1:]]
    assert numbers == [summary.parameters, summary.macs, summary.flops]
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.tokens = 3


def test_wrong_names():
    with pytest.raises(ValueError, match="unknown model 'vit_s17'"):
        models.summary("vit_s17")
    with pytest.raises(ValueError, match="unknown option of model 'vit_s16' 'img_size'"):
        models.summary("vit_s16", img_size=3)
    model = nnx.eval_shape(lambda: models.create("vit_nano16", rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="unknown option of ViT 'img_size'; did you mean 'image"):
        models.summary(model, img_size=3)
    with pytest.raises(TypeError, match=r"model must be a name of .* got Linear"):
        models.summary(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
