"""Virtual environments with the compilers of chips that are not there.

Each compiler has one of its own: an installed libtpu makes every other start of jax look for a TPU,
and the CUDA packages are large.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

# What is installed in all of them beside jax: what this project needs of itself, without extras.
_COMMON = tuple(
    requirement
    for requirement in importlib.metadata.requires("cumulant_jax") or ()
    if "extra ==" not in requirement and not requirement.startswith("jax<")
)
_EXTRA = {"gpu": "cuda13", "tpu": "tpu"}
_NAME = {"gpu": "cuda", "tpu": "tpu"}
# Measured with jax 0.11.2 and 0.12.0.1; for the announcement alone.
_INSTALLED_GIGABYTES = {"gpu": 4.9, "tpu": 1.7}
_INSTALLED = "requirements.txt"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Environment:
    """A compiler's environment.

    Attributes:
      platform: "gpu" or "tpu".
      path: the virtual environment.
      requirements: what is installed into it; empty where it was made by someone else.
      is_ready: whether it exists with these.
    """

    platform: str
    path: Path
    requirements: tuple[str, ...]
    is_ready: bool

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def announcement(self) -> str:
        """One line on what will be done."""
        name = f"the {_NAME[self.platform]} compiler's environment {self.path}"
        if self.is_ready:
            return f"using {name}"
        size = _INSTALLED_GIGABYTES[self.platform]
        return f"installing {' '.join(self.requirements)} (about {size} GB) into {name}"


def plan(
    platforms: Iterable[str], *, root: Path, given: Mapping[str, Path | None], jax_version: str
) -> list[Environment]:
    """Which environments are needed, and which of them are there already.

    Args:
      platforms: "gpu" and "tpu", as needed.
      root: where environments of our own are, or will be.
      given: for each platform an environment to use as it is, or None.
      jax_version: what to install.

    Raises:
      FileNotFoundError: a given environment has no interpreter.

    >>> [environment] = plan(["tpu"], root=Path("no"), given={}, jax_version="0.12.0")
    >>> environment.requirements[0], environment.is_ready
    ('jax[tpu]==0.12.0', False)
    """
    environments = []
    for platform in dict.fromkeys(platforms):
        own = given.get(platform)
        if own is not None:
            environment = Environment(platform, own.absolute(), (), True)
            if not environment.python.exists():
                raise FileNotFoundError(
                    f"--environment-{_NAME[platform]} must be a virtual environment; "
                    f"{environment.python} does not exist."
                )
        else:
            requirements = (f"jax[{_EXTRA[platform]}]=={jax_version}", *_COMMON)
            path = root.absolute() / _NAME[platform]
            installed = path / _INSTALLED
            is_ready = installed.exists() and installed.read_text().split() == [*requirements]
            environment = Environment(platform, path, requirements, is_ready)
        environments.append(environment)
    return environments


def create(environment: Environment, say: Say) -> None:
    """Makes an environment unless it is ready.

    Raises:
      OSError: pip failed; what it said is on standard error.
    """
    if environment.is_ready:
        return
    _run([sys.executable, "-m", "venv", "--clear", str(environment.path)], environment)
    pip = [str(environment.python), "-m", "pip", "install", "--quiet"]
    _run([*pip, "--disable-pip-version-check", *environment.requirements], environment)
    installed = environment.path / _INSTALLED
    installed.write_text("\n".join(environment.requirements) + "\n")
    say(f"installed {environment.path}")


def _run(command: list[str], environment: Environment) -> None:
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise OSError(
            f"{environment.path} could not be made: {' '.join(command)} failed. If this release of "
            "jax has no such packages, name another one with --jax."
        )
