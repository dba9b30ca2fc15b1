"""The random words against a plain Philox4x64-10, and the properties of the order."""

import numpy as np
import pytest

from cumulant_jax.data import random_order

MASK = 2**64 - 1


def philox(counter, key):
    """Philox4x64-10 of Salmon et al. (SC 2011) on Python integers."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        low = 0xD2E7470EE14C6C93 * counter[0]
        high = 0xCA5A826395121157 * counter[2]
        counter = [
            (high >> 64) ^ counter[1] ^ key[0],
            high & MASK,
            (low >> 64) ^ counter[3] ^ key[1],
            low & MASK,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def test_the_plain_philox_gives_the_published_answer():
    # Known answer test of the Random123 library for counter and key zero.
    assert [f"{word:016x}" for word in philox([0] * 4, [0] * 2)] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]


@pytest.mark.parametrize("seed", [0, 17, 2**63 - 1])
@pytest.mark.parametrize("epoch", [0, 5])
def test_permutation_sorts_the_words_of_philox(seed, epoch):
    # NumPy steps the counter before the first block.
    words = [word for block in range(1, 4) for word in philox([block, 0, epoch, 0], [seed, 0])]
    expected = sorted(range(11), key=lambda i: words[i])
    assert random_order.permutation(11, seed, epoch).tolist() == expected


@pytest.mark.parametrize("position", [0, 2])
def test_augment_words_are_their_own_streams(position):
    expected = philox([1, 0, 9, 0], [4, 1 + position])
    words = random_order.augment_words(4, position, step=9, batch_size=2, count=2)
    assert words.ravel().tolist() == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_every_epoch_is_another_permutation(seed):
    size = 23
    stream = random_order.batch_indices(size, seed, 0, 4 * size).reshape(4, size)
    for epoch in stream:
        assert sorted(epoch) == list(range(size))
    assert len({tuple(epoch) for epoch in stream}) == 4


def test_any_cut_of_the_stream_is_the_same_stream():
    whole = random_order.batch_indices(7, 3, 0, 60)
    for start in range(0, 60, 9):
        stop = min(start + 25, 60)
        np.testing.assert_array_equal(
            random_order.batch_indices(7, 3, start, stop), whole[start:stop]
        )


def test_first_places_are_uniform():
    # 3,000 epochs of 5: the chance of a count off by more than 6 standard deviations is 1e-8.
    firsts = [random_order.permutation(5, 0, epoch)[0] for epoch in range(3000)]
    counts = np.bincount(firsts, minlength=5)
    assert np.abs(counts - 600).max() < 6 * np.sqrt(3000 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**63, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_seeds(seed, error):
    with pytest.raises(error, match="seed"):
        random_order.check_seed(seed)
