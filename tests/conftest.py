"""Settings shared by all tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """float64 for the duration of a test."""
    with jax.enable_x64(True):
        yield
