"""Checks of what a model is called with."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cumulant_jax.models import option_checks as checks


def check_images(images: Any, *, channels: int, multiple: tuple[int, int] = (1, 1)) -> None:
    """Raises unless images are floats [batch, height, width, channels] of a possible size.

    >>> check_images(jnp.zeros((2, 32, 48, 3)), channels=3, multiple=(16, 16))
    """
    if not isinstance(images, jax.Array | np.ndarray):
        raise TypeError(f"images must be an array, got {type(images).__name__}")
    shape, (rows, columns) = images.shape, multiple
    if (
        len(shape) != 4
        or shape[3] != channels
        or 0 in shape[1:3]
        or shape[1] % rows
        or shape[2] % columns
    ):
        sides = "positive" if multiple == (1, 1) else f"positive multiples of {rows} and {columns}"
        raise ValueError(
            f"images must be [batch, height, width, {channels}] with height and width {sides}, "
            f"got shape {shape}"
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(f"images must be normalised floats, got {images.dtype}: scale them first")


def check_token_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raises unless mask is None or a boolean array of the shape of the tokens.

    >>> check_token_mask(np.ones((2, 3), bool), (2, 3))
    """
    if mask is None:
        return
    if not isinstance(mask, jax.Array | np.ndarray):
        raise TypeError(f"mask must be a boolean array, got {type(mask).__name__}")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean, True = a token, got {mask.dtype}: compare first")
    if mask.shape != tuple(shape):
        raise ValueError(f"mask must be [batch, tokens] = {tuple(shape)}, got shape {mask.shape}")


def split_key(
    rng: Array | None, count: int, *, train: bool, rates: Mapping[str, float]
) -> Array | None:
    """All keys of one call of a model, split once at the top; None where nothing is random.

    Args:
      rng: the key of the call.
      count: how many keys the parts of the model take.
      train: whether the rates act.
      rates: drop rates by their option's name.

    Raises:
      ValueError: there is no key although a rate acts.
      TypeError: rng is no key.

    >>> split_key(None, 6, train=True, rates={"dropout": 0.0}) is None
    True
    """
    if rng is not None:
        checks.check_key("rng", rng)
    active = [name for name, rate in rates.items() if rate > 0] if train else []
    if not active:
        return None
    if rng is None:
        raise ValueError(
            f"rng must be a key when train=True and {active[0]} is above 0, got None: "
            "pass jax.random.key(seed), a new one at each step"
        )
    return jax.random.split(rng, count)
