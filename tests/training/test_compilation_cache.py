from pathlib import Path

import jax
import pytest

from cumulant_jax.training import enable_compilation_cache


@pytest.fixture(autouse=True)
def _restore():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_directory_is_the_users_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert enable_compilation_cache() == tmp_path / "cache" / "cumulant_jax" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert enable_compilation_cache() == Path.home() / ".cache" / "cumulant_jax" / "xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    assert enable_compilation_cache() == tmp_path / "mine"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")  # type: ignore[attr-defined]


def test_an_empty_variable_turns_the_cache_off(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == before  # type: ignore[attr-defined]


def test_a_second_start_finds_the_program_and_says_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "compile.py"
    script.write_text(
        "import sys, jax, jax.numpy as jnp\n"
        "from cumulant_jax.training import enable_compilation_cache\n"
        "enable_compilation_cache()\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))\n"
        "jax.jit(lambda x: jnp.tanh(x @ x))(jnp.ones((64, 64))).block_until_ready()\n"
        "print(any('cache_hits' in name for name in hits))\n"
    )
    for expected in ("False", "True"):
        code, output, errors = start(script).end()
        assert (code, output.strip(), errors) == (0, expected, "")
