"""Times of a step, with numbers worked out by hand."""

import pytest

from cumulant_jax.analysis.plan_tables import exchanges, to_csv, to_markdown
from cumulant_jax.costs.chips import CHIPS
from cumulant_jax.costs.collectives import Collective
from cumulant_jax.costs.step_estimate import best_first, step_cost

H100 = CHIPS["h100"]
V5E = CHIPS["v5e"]


def cost(chip=V5E, **changes):
    values = {
        "mesh": "data=4",
        "devices": 4,
        "batch_size": 64,
        "dtype": "bfloat16",
        "flops": 4 * 197e12 * 0.010,
        "memory_bytes": 8e9,
        "traffic_bytes": 819e9 * 0.004,
        "collectives": [],
        "compile_seconds": 1.0,
    }
    return step_cost(chip, **(values | changes))


def all_reduce(size, group):
    return Collective(kind="all-reduce", shape="", size_bytes=size, group=group)


def test_products_traffic_and_exchanges():
    # A ring of 4 sends 2 * 3/4 of the array: 3 ms at 100 GB/s.
    found = cost(collectives=[all_reduce(200_000_000, (0, 1, 2, 3))])
    assert found.compute_seconds == pytest.approx(0.010)
    assert found.traffic_seconds == pytest.approx(0.004)
    assert found.sent_seconds == pytest.approx(0.003)
    assert found.fastest_seconds == pytest.approx(0.010)
    assert found.estimated_seconds == pytest.approx(0.013)
    assert found.mfu == pytest.approx(10 / 13)
    assert found.examples_per_second == pytest.approx(64 / 0.013)
    assert found.intensity == pytest.approx(197e12 * 0.010 / (819e9 * 0.004))


def test_kinds_are_told_apart():
    gather = Collective(kind="all-gather", shape="", size_bytes=4_000_000, group=(0, 1), count=3)
    found = cost(collectives=[all_reduce(2_000_000, (0, 1)), gather, gather])
    assert found.sent == {"all-gather": (6, 12_000_000), "all-reduce": (1, 2_000_000)}
    assert (found.sent_bytes, found.exchanges) == (14_000_000, 7)
    assert exchanges([found, cost(memory_bytes=None)]) == [
        "| mesh | batch | all-gather | all-reduce |",
        "| --- | ---: | ---: | ---: |",
        "| data=4 | 64 | 6 × 2.00 MB | 1 × 2.00 MB |",
    ]
    header, row, _ = to_csv([found, cost(memory_bytes=None)]).splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert (values["all-gather_bytes"], values["all-reduce_bytes"]) == ("12000000", "2000000")


def test_hosts_of_gpus_are_linked_by_the_network():
    inside = cost(H100, collectives=[all_reduce(10**9, (0, 1, 6, 7))])
    between = cost(H100, collectives=[all_reduce(10**9, (0, 8, 16, 24))])
    assert inside.sent_seconds == pytest.approx(1.5e9 / 450e9)
    assert between.sent_seconds == pytest.approx(1.5e9 / 50e9)


def test_what_does_not_fit_comes_last_and_says_so():
    fast, slow = cost(batch_size=64), cost(batch_size=32)
    full, over = cost(memory_bytes=15.9e9, batch_size=512), cost(memory_bytes=None)
    assert [c.fits for c in (fast, full, over)] == [True, False, False]
    assert best_first([over, slow, full, fast]) == [fast, slow, full, over]
    lines = to_markdown(V5E, best_first([over, slow, full, fast]))
    assert lines[2].startswith("| data=4 | 64 | 8.00 GB | yes |")
    assert lines[-1].startswith("| data=4 | 64 | over 16 GB | no |")
    assert len({line.count("|") for line in lines}) == 1
    header, *rows = to_csv([fast, over]).splitlines()
    assert len(rows) == 2
    assert {row.count(",") for row in rows} == {header.count(",")}
