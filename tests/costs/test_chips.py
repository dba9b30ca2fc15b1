"""Published rates, and occupancies counted by hand."""

import pytest

from cumulant_jax.costs.chips import CHIPS, chip_named, occupancy

H100 = CHIPS["h100"]


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "blocks", "share"),
    [
        # 158 · 32 = 5056 registers a warp, rounded to 5120; four warps take 20480 of 65536: 3.
        # Shared memory allows 233472 // (70688 + 1024, rounded to 71808) = 3. 12 warps of 64.
        (158, 70_688, 128, 3, 12 / 64),
        # Registers: 2048 a warp, 8 blocks of 4; shared memory: 233472 // 101376 = 2.
        (64, 100_352, 128, 2, 8 / 64),
        # Nothing but the 32 blocks limits one warp of 32 registers.
        (32, 0, 32, 32, 32 / 64),
        # 2048 threads at most: two blocks of 1024, with 32 · 1024 registers each.
        (32, 0, 1024, 2, 1.0),
        # 48 threads are two warps, of 8192 registers each: 8 warps, 4 blocks.
        (255, 0, 48, 4, 8 / 64),
    ],
)
def test_occupancy(registers, shared_bytes, threads, blocks, share):
    held = occupancy(H100, registers=registers, shared_bytes=shared_bytes, threads=threads)
    assert (held.blocks, held.share) == (blocks, pytest.approx(share))


def test_occupancy_is_of_gpus():
    with pytest.raises(ValueError, match="chip must be a GPU for an occupancy, got TPU v5e"):
        occupancy(CHIPS["v5e"], registers=1, shared_bytes=0, threads=32)


def test_the_clocks_of_tpus_give_their_published_peaks():
    units = {"v5e": (1, 128), "v5p": (2, 128), "v6e": (1, 256)}
    for name, (cores, side) in units.items():
        chip = CHIPS[name]
        assert chip.cores == cores
        peak = cores * 4 * side**2 * 2 * chip.clock
        assert peak == pytest.approx(chip.matmul_flops["bfloat16"], rel=0.01)


def test_an_unknown_chip():
    with pytest.raises(ValueError, match="unknown chip 'h10'; did you mean 'h100'"):
        chip_named("h10")
