import csv
import io

import numpy as np
import pytest

from cumulant_jax.analysis import Spread, summarize, tables, to_csv


@pytest.mark.parametrize("seed", range(3))
def test_spread_is_numpys_mean_and_sample_deviation(seed):
    values = np.random.default_rng(seed).normal(size=5 + seed)
    spread = Spread.of(list(values))
    np.testing.assert_allclose(spread.mean, np.mean(values), rtol=1e-12)
    np.testing.assert_allclose(spread.sd, np.std(values, ddof=1), rtol=1e-12)


def test_one_seed_has_no_deviation():
    assert Spread.of([0.5]) == Spread(0.5, None)


def test_summaries_keep_the_order_of_the_kinds(results):
    softmax, cumulant = summarize([results[0], results[2], results[1], results[3]])
    assert (softmax.kind, cumulant.kind) == ("softmax", "cumulant3")
    assert softmax.seeds == cumulant.seeds == (0, 1)
    assert softmax.accuracy.mean == pytest.approx(0.96)
    assert cumulant.accuracy.sd == pytest.approx(0.03 / np.sqrt(2))
    assert cumulant.parameters == 151_254


def test_unmeasured_times_are_left_out(make_result):
    measured = make_result("softmax", 0, 0.9)
    resumed = make_result("softmax", 1, 0.9, step_time_ms=None, images_per_second=None)
    (row,) = summarize([measured, resumed])
    assert row.step_time_ms == Spread(6.0, None)
    (row,) = summarize([resumed])
    assert row.step_time_ms is None
    assert row.images_per_second is None
    assert "|        - |" in tables.to_markdown([row])


def test_a_seed_twice_is_refused(results):
    with pytest.raises(ValueError, match=r"seed of kind 'softmax' appears twice: \(0, 0\)"):
        summarize([results[0], results[0]])


def test_runs_of_different_size_are_refused(make_result):
    runs = [make_result("tssa", seed, 0.9, parameters=100 + seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match=r"'tssa' have different sizes: \[100, 101\]"):
        summarize(runs)


def test_csv_keeps_every_digit(make_result):
    run = make_result("linear", 7, 1 / 3, step_memory_bytes=None)
    (row,) = csv.DictReader(io.StringIO(to_csv([run])))
    assert float(row["accuracy"]) == 1 / 3
    assert (row["kind"], row["seed"], row["step_memory_bytes"]) == ("linear", "7", "")


def test_markdown_is_a_table_with_one_row_per_kind(results):
    lines = tables.to_markdown(summarize(results)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1, "aligned"
    assert cells[0] == list(tables.COLUMNS)
    assert set("".join(cells[1])) == {"-", ":"}
    assert cells[2] == [
        "softmax", "96.0 ± 1.4", "151,242", "10,050", "6.50 ± 0.71", "12.3", "2",
    ]  # fmt: skip
    assert cells[3][:2] == ["cumulant, order 3", "97.5 ± 2.1"]
