"""The benchmark runs, counts right and measures a process of its own."""

import json

import jax
import numpy as np
import pytest

from cumulant_jax.analysis import attention_cost, kernel_benchmark, model_benchmark
from cumulant_jax.analysis.attention_cost import DOT_PRODUCT, Case
from cumulant_jax.analysis.kernel_benchmark import KernelCase, Rates
from cumulant_jax.kernels import block_sizes
from cumulant_jax.kernels.token_pass import CANDIDATES
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


def test_kernels(tmp_path):
    """On a CPU every operation is XLA's; the tables and the check are the same."""
    arguments = ("--parts", "kernels", "--kinds", "cumulant3,tssa", "--tokens", "20")
    assert run(tmp_path, *arguments, "--rounds", "1", "--heads", "2") == 0
    results = json.loads((tmp_path / "benchmark.json").read_text())
    assert results["rates"]["bytes_per_second"] > 0
    cases = [(r["case"]["kind"], r["case"]["is_causal"]) for r in results["kernels"]]
    assert cases == [(k, c) for k in ("cumulant3", "tssa") for c in (False, True)]
    for result in results["kernels"]:
        assert result["implementation"] == "xla"
        assert result["error"] < 5e-5
        assert (DOT_PRODUCT in result["both"]) == (result["case"]["kind"] == "cumulant3")
    assert "| causal cumulant3 | 256 | 20 | xla | both |" in (tmp_path / "benchmark.md").read_text()


def test_bytes_and_flops_of_a_kernel():
    case = KernelCase(kind="cumulant3", tokens=100, batch=2, heads=3, dim=8, dtype="bfloat16")
    array = 2 * 100 * 3 * 8 * 2
    assert case.bytes(backward=False) == 4 * array
    assert case.bytes(backward=True) == (4 + 7) * array
    # Per head and token, 16 features by 8 value dims, summed and read out: two operations each.
    assert case.flops(backward=False) == 2 * 3 * 100 * (16 * 8) * 2 * 2
    rates = Rates(bytes_per_second=1e3, flops_per_second=1e30)
    assert case.floor(rates, backward=False) == 4 * array / 1e3
    assert KernelCase(kind="tssa", tokens=10).bytes(backward=True) == (2 + 3) * 10 * 12 * 64 * 2


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    case = KernelCase(kind="cumulant3", tokens=20, heads=2, dim=8, dtype="float32")
    right = KernelCase.function

    def wrong(self, implementation):
        if implementation == "xla":
            return right(self, implementation)
        return lambda q, k, v: 1.01 * right(self, "xla")(q, k, v)

    monkeypatch.setattr(KernelCase, "function", wrong)
    with pytest.raises(ArithmeticError, match=r"cumulant3 with mosaic_gpu at 20 tokens is wrong"):
        kernel_benchmark.largest_error(case, "mosaic_gpu")


def test_tuning_writes_a_table_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setitem(CANDIDATES, "chunk_bytes", (1 << 12, 1 << 13))
    arguments = ("--tune", "--tokens", "300", "--rounds", "1", "--heads", "1")
    assert run(tmp_path, *arguments) == 0
    table = json.loads((tmp_path / "block_sizes.json").read_text())
    assert table["xla"]["cpu"]["chunk_bytes"] in (1 << 12, 1 << 13)
    monkeypatch.setenv(block_sizes.ENVIRONMENT_VARIABLE, str(tmp_path / "block_sizes.json"))
    assert dict(block_sizes.tuned("xla", "cpu")) == table["xla"]["cpu"]


def test_models(tmp_path, monkeypatch):
    """The table; PyTorch's part in a process that stands in for it."""
    stand_in = tmp_path / "python"
    seconds = {"vit_s16": 2.0, "tost_small_12": 3.0}
    stand_in.write_text(f"#!/bin/sh\necho '{json.dumps({'seconds': seconds})}'\n")
    stand_in.chmod(0o755)
    calls = []

    def instead(name, attention, batch, image_size):
        calls.append((name, attention, batch, image_size))
        return lambda: np.zeros(3)

    monkeypatch.setattr(model_benchmark, "_forward_and_backward", instead)
    arguments = ("--parts", "models", "--rounds", "1", "--torch-python", str(stand_in))
    assert run(tmp_path, *arguments) == 0
    assert ("tost_small_12", "tssa", 8, 224) in calls
    results = json.loads((tmp_path / "benchmark.json").read_text())["models"]
    assert [r["torch_seconds"] for r in results] == [2.0, None, 3.0]
    assert "| tost_small_12 | tssa |" in (tmp_path / "benchmark.md").read_text()


def test_a_model_runs_forward_and_backward():
    loss, gradients = model_benchmark._forward_and_backward("vit_nano4", "cumulant3", 2, 8)()
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
