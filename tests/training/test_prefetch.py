import itertools

import numpy as np

from cumulant_jax.training.mesh import batch_sharding, make_mesh
from cumulant_jax.training.prefetch import DevicePrefetch


class Counter:
    """Batches 0, 1, 2, …; its state is the number of the next."""

    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return {"x": np.full(8, self.next - 1, np.int32)}

    def get_state(self):
        return {"step": self.next}


def test_the_state_is_that_of_the_last_batch_handed_out():
    source = Counter()
    batches = DevicePrefetch(source, batch_sharding(make_mesh()), depth=3)
    assert batches.state == {"step": 0}
    for number, batch in zip(range(10), itertools.islice(batches, 10), strict=True):
        assert int(batch["x"][0]) == number
        assert batches.state == {"step": number + 1}
        assert source.next == number + 4
