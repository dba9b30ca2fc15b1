"""Rows, predictions and tables of compiled kernels, with numbers worked out by hand."""

import csv
import dataclasses
import io

import pytest

from cumulant_jax.analysis.compiler_dumps import GpuKernel, TpuKernel
from cumulant_jax.analysis.kernel_benchmark import KernelCase
from cumulant_jax.analysis.kernel_report import (
    case_of,
    make_row,
    predict,
    read_files,
    spilling,
    to_csv,
)
from cumulant_jax.analysis.kernel_tables import (
    BEGIN,
    END,
    kernel_table,
    operation_table,
    put_between_markers,
    report,
)
from cumulant_jax.costs.chips import CHIPS
from tests.analysis import compiler_texts as texts

CASE = KernelCase(kind="cumulant2", tokens=1000, heads=2, dim=64)
TOKENS = 1000 * 2 * 64 * 2  # bytes of one array in bfloat16
MOMENTS = 4 * 2 * 65 * 65
MATRIX = 4 * 2 * 65 * 64
GPU_KERNEL = GpuKernel(
    registers=158, spill_bytes=0, shared_bytes=70_689, threads=128, wgmma=3, tma=4
)
TPU_KERNEL = TpuKernel(vmem_bytes=2 << 20, bundles=1500, spills=7, fills=8)


def record(kernel="sum_moments", program="forward", **changes):
    facts = {
        "program": program,
        "kernel": kernel,
        "grid": [1, 2, 8],
        "array_bytes": 2 * TOKENS + MOMENTS,
        "moved_bytes": None,
        "has_loop": False,
    }
    return dataclasses.asdict(CASE) | facts | changes


def test_a_gpu_row():
    row = make_row(CHIPS["h100"], record(), GPU_KERNEL)
    assert (row.chip, row.operation, row.kernel, row.grid) == (
        "h100",
        "cumulant2",
        "sum_moments",
        "2×8",
    )
    assert (row.registers, row.spills, row.memory_bytes) == (158, 0, 70_689)
    assert (row.wgmma, row.tma, row.blocks_per_core, row.bundles) == (3, 4, 3, None)
    assert row.bytes == row.moved_bytes == 2 * TOKENS + MOMENTS
    assert row.flops == 2 * 1000 * 2 * 65 * 65
    assert row.intensity == row.flops / row.bytes
    # 24 FLOPs per byte are far below 989e12 / 3.35e12: the memory decides, and it is the floor.
    assert row.microseconds == pytest.approx(1e6 * row.bytes / 3.35e12)
    assert row.floor_share == pytest.approx(1)


def test_moving_twice_the_bytes_halves_the_share():
    row = make_row(CHIPS["h100"], record(array_bytes=2 * (2 * TOKENS + MOMENTS)), GPU_KERNEL)
    assert row.floor_share == pytest.approx(0.5)
    row = make_row(
        CHIPS["v5e"], record(has_loop=True, moved_bytes=4 * (2 * TOKENS + MOMENTS)), TPU_KERNEL
    )
    assert row.floor_share == pytest.approx(0.25)


def test_bundles_are_issued_one_per_cycle_and_core():
    # 1500 bundles at 16 grid steps, at 1.5 GHz: 16 µs, where the bytes take less than one.
    row = make_row(CHIPS["v5e"], record(), TPU_KERNEL)
    assert row.microseconds == pytest.approx(16)
    assert row.floor_share == pytest.approx(row.bytes / 819e9 / 16e-6)
    assert (row.memory_bytes, row.bundles, row.spills) == (2 << 20, 1500, 7)
    two_cores = make_row(CHIPS["v5p"], record(), TPU_KERNEL)
    assert two_cores.microseconds == pytest.approx(1500 * 8 / 1.75e3)
    # What a loop repeats, nobody knows: then the bundles say nothing.
    looping = make_row(CHIPS["v5e"], record(has_loop=True), TPU_KERNEL)
    assert looping.floor_share == pytest.approx(1)


def test_a_kernel_without_a_formula_counts_its_arrays():
    row = make_row(CHIPS["h100"], record("something_new"), GPU_KERNEL)
    assert (row.bytes, row.flops) == (2 * TOKENS + MOMENTS, 0)


def rows_of_a_training_step(chip, compiled):
    names = {
        "sum_moments": ("forward", 2 * TOKENS + MOMENTS),
        "read_out": ("forward", 2 * TOKENS + MATRIX),
        "read_out_backward": ("training", 3 * TOKENS + 2 * MATRIX),
        "sum_moments_backward": ("training", 4 * TOKENS + MOMENTS),
    }
    return [
        make_row(chip, record(name, program, array_bytes=size), compiled)
        for name, (program, size) in names.items()
    ]


def test_an_operation_is_its_kernels_one_after_the_other():
    chip = CHIPS["h100"]
    rows = rows_of_a_training_step(chip, GPU_KERNEL)
    forward = predict(chip, CASE, rows, "forward")
    moved = 4 * TOKENS + MOMENTS + MATRIX
    assert forward.microseconds == pytest.approx(1e6 * moved / 3.35e12)
    assert forward.floor_share == pytest.approx(4 * TOKENS / moved)
    training = predict(chip, CASE, rows, "training")
    moved = 11 * TOKENS + 2 * MOMENTS + 3 * MATRIX
    assert training.floor_share == pytest.approx(11 * TOKENS / moved)


def test_a_forward_kernel_that_saves_for_training_takes_the_place_of_the_plain_one():
    chip = CHIPS["h100"]
    plain = make_row(chip, record(array_bytes=10 * TOKENS), GPU_KERNEL)
    saving = make_row(chip, record(program="training", array_bytes=20 * TOKENS), GPU_KERNEL)
    seconds = predict(chip, CASE, [plain, saving], "training").microseconds
    assert seconds == pytest.approx(1e6 * 20 * TOKENS / 3.35e12)


def test_an_operation_without_kernels():
    with pytest.raises(ValueError, match="rows must hold a kernel of cumulant2"):
        predict(CHIPS["h100"], CASE, [], "forward")


def test_only_gpus_must_not_spill():
    spilled = dataclasses.replace(GPU_KERNEL, spill_bytes=8)
    rows = [
        make_row(CHIPS["h100"], record(), GPU_KERNEL),
        make_row(CHIPS["h100"], record("read_out"), spilled),
        make_row(CHIPS["v5e"], record(), TPU_KERNEL),
    ]
    assert spilling(rows) == [rows[1]]


def test_files_are_read_by_platform(tmp_path):
    names = ("kernel.ptx", "ptxas.txt", "module.mlir", "utilization.txt", "program.hlo")
    contents = (texts.PTX, texts.PTXAS, texts.MODULE, texts.UTILIZATION, texts.HLO)
    for name, text in zip(names, contents, strict=True):
        (tmp_path / name).write_text(text)
    assert read_files("gpu", tmp_path).registers == 158
    assert read_files("tpu", tmp_path).bundles == 5


def test_csv_has_every_number():
    rows = rows_of_a_training_step(CHIPS["v5e"], TPU_KERNEL)
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["kernel"] for line in read] == [row.kernel for row in rows]
    assert float(read[0]["microseconds"]) == rows[0].microseconds
    assert read[0]["registers"] == ""


def cells(line):
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def test_tables_show_the_rows():
    gpu, tpu = CHIPS["h100"], CHIPS["v5e"]
    rows = rows_of_a_training_step(gpu, GPU_KERNEL)
    table = kernel_table(gpu, rows)
    shown = dict(zip(cells(table[0]), cells(table[2]), strict=True))
    assert shown["shape"] == "1×1000×2×64"
    assert (shown["registers"], shown["spills"], shown["blocks"]) == ("158", "0", "3")
    assert (shown["shared KB"], shown["occupancy %"], shown["floor %"]) == ("69", "19", "100")
    summary = operation_table([gpu, tpu], [CASE], rows)
    # 1,024,000 of 1,091,080 bytes forward, 2,816,000 of 2,983,440 in all.
    assert cells(summary[2])[-2:] == ["94 / 94", "xla"]


def test_the_report_lists_what_is_asked_for_in_detail():
    chips = [CHIPS["h100"]]
    rows = rows_of_a_training_step(chips[0], GPU_KERNEL)
    options = {"versions": {"jax": "1.2"}, "command": "the command", "date": "2000-01-02"}
    text = "\n".join(report(chips, [CASE], rows, in_detail=["cumulant2"], **options))
    assert "Made by `the command` on 2000-01-02 with jax 1.2." in text
    assert text.count("read_out_backward") == 1
    text = "\n".join(report(chips, [CASE], rows, in_detail=["linear"], **options))
    assert "read_out_backward" not in text


def test_markers():
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between_markers(document, ["new"]) == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in ("nothing", BEGIN, f"{END}\n{BEGIN}"):
        with pytest.raises(ValueError, match="must have the lines"):
            put_between_markers(broken, [])


def test_the_case_of_a_record():
    assert case_of(record()) == CASE
