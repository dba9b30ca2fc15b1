"""Reading dumps: numbers that stand in the recorded texts."""

import pytest

from cumulant_jax.analysis.compiler_dumps import (
    GpuKernel,
    TpuKernel,
    read_gpu_kernel,
    read_tpu_kernel,
)
from tests.analysis import compiler_texts as texts


def test_a_gpu_kernel():
    kernel = read_gpu_kernel(ptx=texts.PTX, ptxas=texts.PTXAS, module=texts.MODULE)
    assert kernel == GpuKernel(
        registers=158,
        spill_bytes=0,
        shared_bytes=70_689,
        threads=128,
        wgmma=3,
        tma=3,
    )


def test_spills_are_stores_and_loads():
    kernel = read_gpu_kernel(ptx=texts.PTX, ptxas=texts.SPILLING_PTXAS, module=texts.MODULE)
    assert kernel.spill_bytes == 160


def test_a_tpu_kernel():
    kernel = read_tpu_kernel(utilization=texts.UTILIZATION, hlo=texts.HLO)
    assert kernel == TpuKernel(vmem_bytes=2_886_656, bundles=5, spills=2, fills=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ptxas", "", "lacks the spills in the report of ptxas"),
        ("ptx", "wgmma", "lacks the number of threads in the PTX"),
        ("module", "", "lacks the shared memory of the launch"),
        ("module", "dynamic_shared_memory_size %c1", "lacks the value of %c1"),
    ],
)
def test_what_a_gpu_dump_lacks_is_named(name, text, message):
    dumps = {"ptx": texts.PTX, "ptxas": texts.PTXAS, "module": texts.MODULE, name: text}
    with pytest.raises(ValueError, match=message):
        read_gpu_kernel(**dumps)


def test_the_units_of_an_older_libtpu():
    """The one of jax 0.12.0 counts matrix units as one kind."""
    older = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 4 0 0 1 0 1 1 0
0 0 4 0 0 2 1 0 0 0
"""
    kernel = read_tpu_kernel(utilization=older, hlo=texts.HLO)
    assert (kernel.bundles, kernel.spills, kernel.fills) == (2, 1, 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("utilization", "", "no heading"),
        ("hlo", "", "lacks the scoped memory in the HLO"),
    ],
)
def test_what_a_tpu_dump_lacks_is_named(name, text, message):
    dumps = {"utilization": texts.UTILIZATION, "hlo": texts.HLO, name: text}
    with pytest.raises(ValueError, match=message):
        read_tpu_kernel(**dumps)
