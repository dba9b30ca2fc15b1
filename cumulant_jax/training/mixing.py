"""Mixup, cutmix and label smoothing on the device.

Each example is mixed with its predecessor in the batch: batches are shuffled, so a shift is as
good as a random permutation, and on several devices it moves one row per device instead of all.
"""

import jax
import jax.numpy as jnp

from cumulant_jax.training.config import MixingConfig


def soft_labels(labels: jax.Array, *, num_classes: int, smoothing: float = 0.0) -> jax.Array:
    """Returns labels as distributions.

    Args:
      labels: [B] integers.
      num_classes: the number of classes, C.
      smoothing: the mass that is spread evenly over all classes.

    Returns:
      float32 [B, C], rows summing to 1.

    >>> soft_labels(jnp.array([1]), num_classes=2, smoothing=0.5).tolist()
    [[0.25, 0.75]]
    """
    hard = jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
    return hard * (1 - smoothing) + smoothing / num_classes


def mix(
    images: jax.Array, targets: jax.Array, *, rng: jax.Array, config: MixingConfig
) -> tuple[jax.Array, jax.Array]:
    """Applies mixup or cutmix to a batch, as configured.

    Args:
      images: float [B, H, W, C].
      targets: distributions over classes, float32 [B, N].
      rng: a key; one share of mixing is drawn per batch.
      config: the Beta parameters and probabilities; with neither on, nothing happens.

    Returns:
      Mixed images and targets.

    Source: mixup, arXiv 1710.09412; CutMix, arXiv 1905.04899 (the targets' share is the area of
    the box as it lies inside the image).
    """
    if not (config.mixup or config.cutmix) or not config.probability:
        return images, targets
    apply_key, choice_key, share_key, box_key = jax.random.split(rng, 4)
    kinds = [(mixup, config.mixup)] * bool(config.mixup)
    kinds += [(cutmix, config.cutmix)] * bool(config.cutmix)
    choice = jax.random.randint(choice_key, (), 0, len(kinds))
    alpha = jnp.array([alpha for _, alpha in kinds], jnp.float32)[choice]
    share = jax.random.beta(share_key, alpha, alpha, dtype=jnp.float32)
    is_mixed = jax.random.uniform(apply_key) < config.probability
    return jax.lax.switch(
        jnp.where(is_mixed, 1 + choice, 0),
        [_unmixed, *(kind for kind, _ in kinds)],
        images,
        targets,
        share,
        box_key,
    )


def mixup(
    images: jax.Array, targets: jax.Array, share: jax.Array, rng: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns share·x + (1 − share)·predecessor for images [B, H, W, C] and targets [B, N]."""
    del rng
    return _blend(images, share.astype(images.dtype)), _blend(targets, share)


def cutmix(
    images: jax.Array, targets: jax.Array, share: jax.Array, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Pastes a box of the predecessor's image; targets are blended by the areas.

    Args:
      images: float [B, H, W, C].
      targets: float32 [B, N].
      share: the share of the image to keep, a scalar; the box is clipped at the borders.
      rng: a key for the box's centre.
    """
    height, width = images.shape[1:3]
    y_key, x_key = jax.random.split(rng)
    side = jnp.sqrt(1 - share)

    def inside(key: jax.Array, size: int) -> jax.Array:
        centre = jax.random.uniform(key) * size
        pixels = jnp.arange(size) + 0.5
        return jnp.abs(pixels - centre) < side * size / 2

    box = inside(y_key, height)[:, None] & inside(x_key, width)[None, :]
    kept = 1 - jnp.mean(box, dtype=jnp.float32)
    mixed = jnp.where(box[None, :, :, None], jnp.roll(images, 1, axis=0), images)
    return mixed, _blend(targets, kept)


def _unmixed(
    images: jax.Array, targets: jax.Array, share: jax.Array, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del share, rng
    return images, targets


def _blend(x: jax.Array, share: jax.Array) -> jax.Array:
    return share * x + (1 - share) * jnp.roll(x, 1, axis=0)
