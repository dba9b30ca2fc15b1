import platform
from pathlib import Path

import jax

from cumulant_jax.analysis import describe_environment
from cumulant_jax.analysis.environment import PACKAGES


def test_versions_and_devices_are_told():
    facts = describe_environment()
    assert facts["Python"] == platform.python_version()
    assert facts["jax"] == jax.__version__
    assert facts["devices"].endswith(jax.devices()[0].device_kind)
    assert "cores" in facts["processor"]


def test_nothing_else_is_told():
    facts = describe_environment()
    known = {"date", "Python", *PACKAGES, "system", "processor", "memory", "devices"}
    assert set(facts) <= known
    assert str(Path.home()) not in " ".join(facts.values())
