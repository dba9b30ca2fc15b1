"""The command: a compiler's process is stood in for, its records and files are real ones."""

import csv
import dataclasses
import json
import sys

import pytest

from cumulant_jax.analysis.kernel_tables import BEGIN, END
from cumulant_jax.costs.chips import CHIPS
from experiments import cli, inspect_kernels
from tests.analysis import compiler_texts as texts


def run(*arguments):
    return cli.run(inspect_kernels.main, inspect_kernels._parser(), list(map(str, arguments)))


FILES = {
    "kernel.ptx": texts.PTX,
    "ptxas.txt": texts.PTXAS,
    "module.mlir": texts.MODULE,
    "utilization.txt": texts.UTILIZATION,
    "program.hlo": texts.HLO,
}


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Answers every bfloat16 case with one kernel, whose files the test may change."""
    files = tmp_path / "files"
    files.mkdir()
    for name, text in FILES.items():
        (files / name).write_text(text)

    def compile_cases(chip, cases, environment, directory):
        del chip, environment
        directory.mkdir(parents=True, exist_ok=True)
        yield {"versions": {"jax": "1.2.3"}}
        for case in cases:
            record = dataclasses.asdict(case) | {"program": "forward"}
            if case.dtype == "float32":
                yield record | {"reason": "it takes bfloat16"}
            else:
                yield record | {
                    "kernel": "sum_moments",
                    "grid": [12, 16],
                    "array_bytes": 10**7,
                    "moved_bytes": None,
                    "has_loop": False,
                    "files": str(files),
                }

    monkeypatch.setattr(inspect_kernels, "_compile", compile_cases)
    monkeypatch.setattr(inspect_kernels, "create", lambda environment, say: None)
    return files


def test_report_and_csv(tmp_path, compiler, capsys):
    out = tmp_path / "out"
    code = run("--chips", "h100,v5e", "--operations", "cumulant3,linear", "--directory", out)
    assert code == 0
    printed = capsys.readouterr()
    assert "jax (gpu) 1.2.3, jax (tpu) 1.2.3" in printed.out
    assert "GB" in printed.err
    rows = list(csv.DictReader((out / "kernels.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 4
    assert {row["registers"] for row in rows} == {"158", ""}
    assert (out / "kernels.md").read_text().strip() == printed.out.strip()


def test_spills_are_an_error(tmp_path, compiler, capsys):
    (compiler / "ptxas.txt").write_text(texts.SPILLING_PTXAS)
    code = run("--chips", "h100", "--operations", "cumulant3", "--directory", tmp_path / "out")
    assert code == 1
    assert "sum_moments of cumulant3 spills 160 bytes" in capsys.readouterr().err


def test_a_case_that_fails_to_compile_is_an_error(tmp_path, monkeypatch, capsys):
    def fail(chip, cases, environment, directory):
        directory.mkdir(parents=True, exist_ok=True)
        yield dataclasses.asdict(cases[0]) | {"error": "MosaicError: no layout"}

    monkeypatch.setattr(inspect_kernels, "_compile", fail)
    monkeypatch.setattr(inspect_kernels, "create", lambda environment, say: None)
    code = run("--chips", "v6e", "--operations", "linear", "--directory", tmp_path)
    assert code == 1
    assert "linear on TPU v6e: MosaicError: no layout" in capsys.readouterr().err


def test_tables_go_between_the_markers(tmp_path, compiler, capsys):
    document = tmp_path / "kernels.md"
    document.write_text(f"# Kernels\n\n{BEGIN}\n{END}\n\nThe end.\n")
    assert run("--docs", document, "--directory", tmp_path / "out") == 0
    text = document.read_text()
    assert text.endswith("The end.\n")
    for chip in map(CHIPS.get, inspect_kernels.INSPECTED):
        assert f"### Kernels on {chip.label}" in text
    assert len(document.with_suffix(".csv").read_text().splitlines()) - 1 == 4 * 10 * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chips", "h10"], "did you mean 'h100'"),
        (["--operations", "cumulnt3"], "did you mean 'cumulant3'"),
        (["--environment-tpu", "nowhere"], "--environment-tpu must be a virtual environment"),
        (["--chips", "v5e", "--docs", "README.md"], "--docs wants the whole report"),
        (["--docs", "README.md"], "must have the lines"),
        (["--docs", "no-such-file.md"], "no-such-file.md"),
        (["--chip", "h100"], "did you mean '--chips'"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, capsys, arguments, words):
    assert run(*arguments, "--directory", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_compiling_process_gets_the_cases_and_is_heard(tmp_path, monkeypatch):
    """A process of our own says what it was given."""
    echo = tmp_path / "bin" / "python"
    echo.parent.mkdir()
    echo.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'arguments': sys.argv[1:], 'case': json.loads(line)}))\n"
        "sys.exit(3 if 'v6e' in str(sys.argv) else 0)\n"
    )
    echo.chmod(0o755)
    [environment] = inspect_kernels.plan(
        ["tpu"], root=tmp_path, given={"tpu": tmp_path}, jax_version="1"
    )
    cases = inspect_kernels.kernel_cases(["causal_tssa"])
    arguments = (cases, environment, tmp_path / "out")
    heard = list(inspect_kernels._compile(CHIPS["v5e"], *arguments))
    assert [record["case"] for record in heard] == [dataclasses.asdict(case) for case in cases]
    assert heard[0]["arguments"][:2] == ["-m", "experiments.compile_kernels"]
    assert "v5e:2x4" in heard[0]["arguments"]
    with pytest.raises(OSError, match=r"stopped with 3; see .*compiler\.log"):
        list(inspect_kernels._compile(CHIPS["v6e"], *arguments))
    assert (
        json.dumps(dataclasses.asdict(cases[0]))
        in (tmp_path / "out" / "v6e" / "cases.jsonl").read_text()
    )
