"""Channel means and standard deviations against plain float64 NumPy."""

import numpy as np
import pytest

from cumulant_jax.data import statistics
from cumulant_jax.data.source import ArraySource


@pytest.mark.parametrize("channels", [1, 3])
def test_all_images_in_memory_count(channels):
    rng = np.random.default_rng(channels)
    scale = np.arange(1, channels + 1) * 60
    images = (rng.random((9000, 3, 3, channels)) * scale).astype(np.uint8)
    mean, std = statistics.channel_statistics(ArraySource(images, np.zeros(9000, np.int32)))
    pixels = images.astype(np.float64) / 255
    assert mean == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=6e-5)
    assert std == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=6e-5)


def test_a_long_stream_is_sampled_over_its_whole_length():
    class Stream:
        image_shape = (1, 1, 1)

        def __init__(self):
            self.read = []

        def __len__(self):
            return 100_000

        def gather(self, indices):
            self.read.extend(indices)
            return np.zeros((len(indices), 1, 1, 1), np.uint8), np.zeros(len(indices), np.int32)

    stream = Stream()
    assert statistics.channel_statistics(stream) == ((0.0,), (1.0,))
    assert len(set(stream.read)) == len(stream.read) == 2048
    assert min(stream.read) == 0
    assert max(stream.read) > 99_900
