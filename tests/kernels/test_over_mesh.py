"""Attention where its arrays are: batch, heads and tokens split over eight devices."""

import os
import subprocess
import sys

from tests.kernels import on_eight_devices


def test_eight_devices():
    """Values, gradients, carried states, both kinds of mesh, and what is sent: see the program."""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    done = subprocess.run(
        [sys.executable, "-m", on_eight_devices.__name__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal on 8 devices" in done.stdout
