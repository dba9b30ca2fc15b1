"""Runs kernels on the CPU, in Pallas's interpreters: memory starts as NaN, races are errors."""

import contextlib

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from cumulant_jax.kernels import assume_device
from cumulant_jax.kernels.device import H100, TPU_V5E


@contextlib.contextmanager
def _tpu():
    parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        with pltpu.force_tpu_interpret_mode(parameters):
            yield
        races = tpu_interpreter.races
        assert races is None or not races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@contextlib.contextmanager
def _gpu():
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(parameters):
        yield
    # A race raises at once since jax 0.12; before, it was only noted.
    races = gpu_interpreter._races
    assert races is None or not races.races_found


_INTERPRETERS = {"mosaic_tpu": (_tpu, TPU_V5E), "mosaic_gpu": (_gpu, H100)}


@contextlib.contextmanager
def interpreted(implementation: str):
    """Runs the kernels of an implementation on the CPU, traced for a device that has them."""
    interpreter, device = _INTERPRETERS[implementation]
    with interpreter(), assume_device(device):
        yield
