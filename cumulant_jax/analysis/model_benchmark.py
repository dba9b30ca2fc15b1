"""The time of forward and backward of whole models, beside PyTorch's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from cumulant_jax import models
from cumulant_jax.analysis import torch_models
from cumulant_jax.analysis.timing import time_in_turn

#: Name, attention, and which of `torch_models.MODELS` has the same operations.
MODELS = (
    ("vit_s16", "softmax", "vit_s16"),
    ("vit_s16", "cumulant3", None),
    ("tost_small_12", "tssa", "tost_small_12"),
)


@dataclasses.dataclass(frozen=True)
class ModelTime:
    """What was measured of one model.

    Attributes:
      name: of the model.
      attention: its kind.
      seconds: median of forward, cross-entropy and backward, in float32.
      torch_seconds: of the same in PyTorch; None where there is no counterpart or no PyTorch.
    """

    name: str
    attention: str
    seconds: float
    torch_seconds: float | None


def measure_models(
    *, batch: int, image_size: int, rounds: int, torch_python: str | None
) -> list[ModelTime]:
    """Times the models in turn, and then PyTorch's in a process of its own."""
    calls = {}
    for name, attention, _ in MODELS:
        call = _forward_and_backward(name, attention, batch, image_size)
        calls[f"{name} {attention}"] = call
    timings = time_in_turn(calls, rounds=rounds)
    peers = {}
    if torch_python is not None:
        peers = _torch_seconds(torch_python, batch, image_size, rounds)
    return [
        ModelTime(name, attention, timings[f"{name} {attention}"].median, peers.get(peer or ""))
        for name, attention, peer in MODELS
    ]


def _forward_and_backward(name: str, attention: str, batch: int, image_size: int):
    model = models.create(name, attention=attention, image_size=image_size, rngs=nnx.Rngs(0))
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
    images = jax.random.normal(jax.random.key(0), (batch, image_size, image_size, 3))
    labels = jnp.zeros((batch,), int)

    @jax.jit
    def run(parameters, rest, images):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters, rest)(images, train=True)
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(batch), labels])

        return jax.value_and_grad(loss)(parameters)

    return lambda: run(parameters, rest, images)


def _torch_seconds(python: str, batch: int, image_size: int, rounds: int) -> dict[str, float]:
    case = json.dumps({"batch": batch, "image_size": image_size, "rounds": rounds})
    command = [python, str(Path(torch_models.__file__)), case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"{python} cannot measure PyTorch's models: {lines[-1]}")
    return json.loads(done.stdout)["seconds"]
