"""What the training loop adds to the bare compiled step on data that is already on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time

import jax

from cumulant_jax.training import ExperimentConfig, SilentReporter, build, train
from cumulant_jax.training.mesh import batch_sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overhead:
    """Milliseconds per step, medians over rounds taken in turn.

    Attributes:
      bare_ms: the compiled step on one resident batch, called again and again.
      loop_ms: the same step through `train`, with reading, augmenting, logging and files.
      ratio: median of loop / bare, round by round.
    """

    bare_ms: float
    loop_ms: float
    ratio: float


def measure_overhead(config: ExperimentConfig, *, steps: int, rounds: int) -> Overhead:
    """Times the bare step and the loop in turn, `steps` steps each, `rounds` times.

    Evaluation and checkpoints happen once, at the end, outside the loop's own clock; the rows of
    metrics are within.
    """
    config = dataclasses.replace(
        config,
        total=steps,
        evaluate_every=steps,
        checkpoint_every=steps,
        optimizer=dataclasses.replace(config.optimizer, warmup=0),
    )
    experiment = build(config)
    step = experiment.compile_train_step()
    with contextlib.closing(experiment.train_iterator()) as iterator:
        batch = next(iterator)
    batch = jax.device_put(batch, batch_sharding(experiment.mesh))
    bare, loop = [], []
    for _ in range(rounds + 1):
        bare.append(_bare_milliseconds(experiment, step, batch, steps))
        with tempfile.TemporaryDirectory() as directory:
            loop.append(train(config, directory, reporter=SilentReporter()).step_time_ms)
    # The first round warms up caches and files.
    bare, loop = bare[1:], loop[1:]
    ratios = [a / b for a, b in zip(loop, bare, strict=True)]
    return Overhead(
        bare_ms=statistics.median(bare),
        loop_ms=statistics.median(loop),
        ratio=statistics.median(ratios),
    )


def _bare_milliseconds(experiment, step, batch, steps: int) -> float:
    with jax.set_mesh(experiment.mesh):
        state = experiment.create_state()
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = step.call(state, batch)
        jax.block_until_ready((state, metrics))
        return 1e3 * (time.perf_counter() - began) / steps
