"""A cache of compiled programs on disk, so that a second start does not compile again."""

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> Path | None:
    """Turns JAX's persistent compilation cache on.

    The directory is $JAX_COMPILATION_CACHE_DIR where that is set (empty turns the cache off), else
    `cumulant_jax/xla` in $XDG_CACHE_HOME or ~/.cache.

    Returns:
      The directory, or None if the cache is off.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen == "":
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(chosen) if chosen else root / "cumulant_jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX's own threshold of 1 s leaves out half of what a small model compiles.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return directory
