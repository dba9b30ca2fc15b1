"""AdamW with warm-up, cosine decay, clipping, and no decay where it does harm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from cumulant_jax.models import decays
from cumulant_jax.training.config import OptimizerConfig


def make_schedule(
    config: OptimizerConfig, *, total_steps: int, warmup_steps: int
) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    Step s of the warm-up has the rate peak·(s + 1)/warmup_steps, so the first step already moves
    and the last one of the warm-up has the peak. Then follows half a cosine, which would reach
    `final_fraction` of the peak at `total_steps`.

    Args:
      config: the peak and the final fraction.
      total_steps: steps of the whole training.
      warmup_steps: steps of the warm-up, less than `total_steps`.

    Raises:
      ValueError: if the warm-up is as long as the training.
    """
    if warmup_steps >= total_steps:
        raise ValueError(
            f"config key optimizer.warmup: got {config.warmup!r}, which is {warmup_steps} steps, "
            f"expected less than the total of {total_steps} steps: shorten it too, as in "
            f"optimizer.warmup='{total_steps // 4} steps'."
        )

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warmup = (step + 1) / max(1, warmup_steps)
        progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        decayed = config.final_fraction + (1 - config.final_fraction) * cosine
        return config.learning_rate * jnp.where(step < warmup_steps, warmup, decayed)

    return schedule


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Returns AdamW behind clipping by the global norm."""
    clip = (
        optax.identity()
        if config.clip_norm is None
        else (optax.clip_by_global_norm(config.clip_norm))
    )
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(clip, adamw)


def decay_mask(params: Any) -> Any:
    """Returns a tree of booleans: which parameters weight decay applies to."""

    def is_decayed(path, leaf) -> bool:
        del leaf
        return decays(tuple(getattr(entry, "key", getattr(entry, "name", "")) for entry in path))

    return jax.tree_util.tree_map_with_path(is_decayed, params)
