"""scripts/find_python.sh, run with PATHs that hold nothing but made-up interpreters."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "find_python.sh"
TOOLS = ("sh", "dirname", "ls", "grep", "awk", "sort", "sed")


class Machine:
    """A home directory and a PATH of our own making."""

    def __init__(self, root: Path):
        self.home = root / "home"
        self.bin = root / "bin"
        self.tools = root / "tools"
        for folder in (self.home, self.bin, self.tools):
            folder.mkdir(parents=True)
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool))

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def python(self, path: Path, version: tuple[int, int, int], *, venv: bool = True) -> Path:
        """Puts an interpreter that claims to be another version, and to lack ensurepip or not."""
        lines = [
            "import sys",
            f"sys.version_info = {version}",
            f"sys._base_executable = sys.executable = {str(path)!r}",
            "" if venv else "sys.modules['ensurepip'] = None",
            "exec(sys.argv[1])",
        ]
        code = "\n".join(lines).replace("'", "'\\''")
        return self.script(path, f"exec '{sys.executable}' -S -c '{code}' \"$2\"")

    def find(self, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["sh", str(SCRIPT)],
            env={"HOME": str(self.home), "PATH": f"{self.bin}:{self.tools}", **environment},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def found(result: subprocess.CompletedProcess) -> Path:
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return Path(result.stdout.rstrip("\n"))


def refusal(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, "one line"
    return result.stderr


def test_no_python_at_all(machine):
    line = refusal(machine.find())
    assert "Python 3.12 or newer is needed, and none was found" in line
    assert "pyenv install 3.12" in line
    assert "uv python install 3.12" in line


def test_only_an_old_python(machine):
    machine.python(machine.bin / "python3.11", (3, 11, 7))
    old = machine.python(machine.bin / "python3", (3, 11, 7))
    assert f"only Python 3.11.7 ({old}) was found" in refusal(machine.find())


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3.14", "python3", "python"])
def test_a_new_python_beside_an_old_one(machine, name):
    machine.python(machine.bin / "python3", (3, 11, 7))
    new = machine.python(machine.bin / name, (3, 13, 0))
    assert found(machine.find()) == new


def test_the_version_wanted_comes_before_newer_ones(machine):
    machine.python(machine.bin / "python3.14", (3, 14, 0))
    wanted = machine.python(machine.bin / "python3.12", (3, 12, 4))
    assert found(machine.find()) == wanted


def test_minor_versions_are_compared_as_numbers(machine):
    machine.python(machine.bin / "python3", (3, 9, 18))
    refusal(machine.find())
    machine.python(machine.bin / "python3", (3, 100, 0))
    assert found(machine.find()) == machine.bin / "python3"


def test_pyenv_is_asked_past_shims_that_refuse(machine):
    # With .python-version naming what is not installed, every shim prints this and exits with 127.
    refuse = 'echo "pyenv: version 3.12 is not installed (set by .python-version)" >&2; exit 127'
    for name in ("python", "python3", "python3.12", "python3.13"):
        machine.script(machine.bin / name, refuse)
    versions = machine.home / ".pyenv" / "versions"
    for version in ((3, 9, 18), (3, 11, 7)):
        machine.python(versions / ".".join(map(str, version)) / "bin/python", version)
    assert "and none was found" in refusal(machine.find())
    new = machine.python(versions / "3.13.0/bin/python", (3, 13, 0))
    assert found(machine.find()) == new


def test_pyenv_gives_the_newest_patch_of_the_version_wanted(machine):
    versions = machine.home / ".pyenv" / "versions"
    for version in ("3.12.9", "3.12.10", "3.13.1", "3.12.2"):
        machine.python(versions / version / "bin/python", tuple(map(int, version.split("."))))
    (versions / "3.13.0t").mkdir()
    (versions / "my-env").mkdir()
    assert found(machine.find()) == versions / "3.12.10/bin/python"


def test_pyenv_says_where_its_versions_are(machine, tmp_path):
    root = tmp_path / "elsewhere with space"
    machine.script(machine.bin / "pyenv", f"echo '{root}'")
    new = machine.python(root / "versions/3.12.1/bin/python", (3, 12, 1))
    assert found(machine.find()) == new


def test_uv_finds_an_interpreter(machine):
    new = machine.python(machine.home / "uv/python", (3, 12, 1))
    machine.script(machine.bin / "uv", f"[ \"$*\" = 'python find 3.12' ] && echo '{new}'")
    machine.python(machine.bin / "python3", (3, 11, 7))
    assert found(machine.find()) == new


def test_uv_installs_an_interpreter_when_it_finds_none(machine):
    new = machine.python(machine.home / "uv/python", (3, 12, 1))
    marker = machine.home / "installed"
    machine.script(
        machine.bin / "uv",
        f"""case "$*" in
        'python install 3.12') : > '{marker}' ;;
        'python find --managed-python 3.12') [ -e '{marker}' ] && echo '{new}' ;;
        *) exit 2 ;;
        esac""",
    )
    assert found(machine.find()) == new


def test_uv_that_cannot_install(machine):
    machine.script(machine.bin / "uv", "exit 1")
    assert "none was found" in refusal(machine.find())


def test_an_interpreter_without_venv_is_passed_over(machine):
    bare = machine.python(machine.bin / "python3.12", (3, 12, 1), venv=False)
    assert f"{bare} cannot create virtual environments" in refusal(machine.find())
    whole = machine.python(machine.bin / "python3.13", (3, 13, 0))
    assert found(machine.find()) == whole


def test_a_named_interpreter_wins(machine):
    machine.python(machine.bin / "python3.12", (3, 12, 1))
    named = machine.python(machine.home / "my python", (3, 14, 1))
    assert found(machine.find(PYTHON=str(named))) == named


@pytest.mark.parametrize("case", ["old", "absent", "no venv"])
def test_a_named_interpreter_that_will_not_do(machine, case):
    machine.python(machine.bin / "python3.12", (3, 12, 1))
    named = machine.home / "python"
    if case != "absent":
        version = (3, 11, 0) if case == "old" else (3, 12, 0)
        machine.python(named, version, venv=case != "no venv")
    assert f"PYTHON={named}" in refusal(machine.find(PYTHON=str(named)))


def test_a_virtual_environment_gives_its_base(machine):
    # The environment may be the very one that is about to be made anew.
    environment = machine.home / "env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120
    )
    path = found(machine.find(PYTHON=str(environment / "bin" / "python")))
    assert not path.is_relative_to(environment)
    assert os.access(path, os.X_OK)
