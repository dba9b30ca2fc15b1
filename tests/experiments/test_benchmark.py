"""The benchmark runs, counts right and measures a process of its own."""

import json

import numpy as np
import pytest

from cumulant_jax.analysis import attention_cost
from cumulant_jax.analysis.attention_cost import DOT_PRODUCT, Case
from experiments import benchmark, cli


def run(directory, *arguments):
    argv = ["--directory", str(directory), *arguments]
    return cli.run(benchmark.main, benchmark._parser(), argv)


def test_attention_and_step(tmp_path):
    code = run(
        tmp_path,
        *("--parts", "attention,step", "--tokens", "16,32", "--rounds", "1", "--steps", "3"),
        *("--kinds", f"cumulant3,tssa,{DOT_PRODUCT}", "--configs", "configs/digits.py"),
    )
    assert code == 0
    results = json.loads((tmp_path / "benchmark.json").read_text())
    assert {(c["kind"], c["tokens"]) for c in results["attention"]} == {
        (k, t) for k in ("cumulant3", "tssa", DOT_PRODUCT) for t in (16, 32)
    }
    assert all(c["seconds"] > 0 for c in results["attention"])
    assert results["step"]["configs/digits.py"]["bare_ms"] > 0
    text = (tmp_path / "benchmark.md").read_text()
    assert "loop / bare" in text
    assert (tmp_path / "attention.png").stat().st_size > 1000


def test_flops_are_those_that_xla_counts():
    """The products of queries and keys dominate at this size; the rest is elementwise."""
    case = Case(tokens=512, heads=1)
    for kind in ("linear", "cumulant2", "cumulant3", "cumulant4"):
        analysis = attention_cost.compile_forward_and_backward(kind, case).cost_analysis()
        assert case.matmul_flops(kind) == pytest.approx(analysis["flops"], rel=0.15)


def test_peak_memory_is_that_of_the_measured_process_alone():
    ballast = np.ones(1 << 27)  # 1 GiB, touched
    del ballast
    peak = attention_cost.peak_memory("cumulant2", Case(tokens=64, heads=1))
    assert 1e8 < peak < 9e8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "attenton"], "did you mean 'attention'"),
        (["--kinds", "cumulnt3"], "did you mean 'cumulant3'"),
        (["--tokens", "many"], "--tokens must be positive numbers"),
        (["--configs", "configs/digts.py"], "configs/digts.py"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, capsys, arguments, words):
    assert run(tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
