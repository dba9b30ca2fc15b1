"""Settings shared by all tests."""

import os

# Pallas's interpreters run programs within callbacks of programs, each on a thread of XLA's pool. A
# machine with two cores has two threads there, and these would wait for each other for ever.
os.environ.setdefault("NPROC", "8")

import jax
import pytest


@pytest.fixture
def x64():
    """float64 for the duration of a test."""
    with jax.enable_x64(True):
        yield
