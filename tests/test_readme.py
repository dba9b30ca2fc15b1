"""The README's Python blocks run, its files exist, and its commands are those of the Makefile."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_there_are_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run_on_their_own(number):
    exec(compile(BLOCKS[number], f"README.md, Python block {number + 1}", "exec"), {})


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_linked_files_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    local = [target for target in targets if not target.startswith(("https://", "#"))]
    missing = [target for target in local if not (ROOT / target.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_commands_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = set(re.findall(r"\bmake ([a-z]+)\b *(?:#|`|$)", text, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert commands
    assert commands <= targets


def test_entry_points_and_configs_exist():
    for name in set(re.findall(r"python -m experiments\.(\w+)", README)):
        assert (ROOT / "experiments" / f"{name}.py").is_file(), name
    for name in set(re.findall(r"configs/\w+\.py", README)):
        assert (ROOT / name).is_file(), name
