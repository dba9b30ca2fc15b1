"""The Python blocks of docs/datasets.md, run in order."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "datasets.md"


def test_the_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("CUMULANT_JAX_CACHE", str(tmp_path / "cache"))
    # TFDS reads the variable when it is imported, which has happened.
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "data"))
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names = {"__name__": "__main__"}
    for block in blocks:
        capsys.readouterr()
        exec(compile(block, str(DOCUMENT), "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"print\(.*\)  # (.*)", block)
        assert [line for line in printed if line in promised] == promised
