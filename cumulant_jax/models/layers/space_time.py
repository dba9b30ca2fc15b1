"""Attention over the space or over the time of a clip, and the position table of one frame.

Tokens are [batch, frames * patches, ...], frame by frame.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.block import Block, LayerScale
from cumulant_jax.models.layers.dropout import key_at
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.positions import LearnedPositions


def to_frames(x: Array, frames: int) -> Array:
    """Makes every frame an example: [batch * frames, patches, ...].

    >>> to_frames(jnp.zeros((2, 12, 8)), 3).shape
    (6, 4, 8)
    """
    batch, tokens, *rest = x.shape
    return x.reshape(batch * frames, tokens // frames, *rest)


def from_frames(x: Array, frames: int) -> Array:
    """Undoes `to_frames`."""
    count, patches, *rest = x.shape
    return x.reshape(count // frames, frames * patches, *rest)


def to_tubes(x: Array, frames: int) -> Array:
    """Makes every place of the image an example: [batch * patches, frames, ...].

    >>> to_tubes(jnp.zeros((2, 12, 8)), 3).shape
    (8, 3, 8)
    """
    batch, tokens, *rest = x.shape
    patches = tokens // frames
    tubes = x.reshape(batch, frames, patches, *rest).swapaxes(1, 2)
    return tubes.reshape(batch * patches, frames, *rest)


def from_tubes(x: Array, frames: int, patches: int) -> Array:
    """Undoes `to_tubes`."""
    count, _, *rest = x.shape
    tokens = x.reshape(count // patches, patches, frames, *rest).swapaxes(1, 2)
    return tokens.reshape(count // patches, frames * patches, *rest)


class SpatialAttention(nnx.Module):
    """An attention layer in which the tokens of a frame attend to each other."""

    def __init__(self, layer: nnx.Module):
        """Wraps a layer of `cumulant_jax.models.layers.attention`."""
        self.layer: Any = layer

    def __call__(self, x: Array, *, frames: int, **call: Any) -> Array:
        """Maps tokens [batch, frames * patches, dim]; the rest goes to the layer."""
        return from_frames(self.layer(to_frames(x, frames), **call), frames)


class TemporalAttention(nnx.Module):
    """An attention layer in which the tokens at a place of the image attend to each other."""

    def __init__(self, layer: nnx.Module):
        """Wraps a layer of `cumulant_jax.models.layers.attention`."""
        self.layer: Any = layer

    def __call__(self, x: Array, *, frames: int, **call: Any) -> Array:
        """Maps tokens [batch, frames * patches, dim]; the rest goes to the layer."""
        patches = x.shape[1] // frames
        return from_tubes(self.layer(to_tubes(x, frames), **call), frames, patches)


@dataclasses.dataclass(frozen=True)
class SplitHeads:
    """An attention function whose first half of the heads attends over time, the other over space.

    This is ViViT's factorised dot product (arXiv 2103.15691, model 4) around any attention
    function; which half is which follows the published code.
    """

    function: Callable[..., Array]

    def __call__(
        self, *projected: Array, frames: int, temperature: Array | None = None, **options: Any
    ) -> Array:
        """Maps arrays [batch, frames * patches, heads, dim] to one of that shape.

        Args:
          *projected: query, key and value, or the one array that serves for all.
          frames: of the clip.
          temperature: [heads], for the functions that have one.
          **options: of the function.
        """
        half = projected[0].shape[-2] // 2
        patches = projected[0].shape[1] // frames

        def attend(heads: slice, group: Callable[[Array, int], Array]) -> Array:
            own = {} if temperature is None else {"temperature": temperature[heads]}
            parts = (group(x[..., heads, :], frames) for x in projected)
            return self.function(*parts, **own, **options)

        over_time = from_tubes(attend(slice(half), to_tubes), frames, patches)
        over_space = from_frames(attend(slice(half, None), to_frames), frames)
        return jnp.concatenate([over_time, over_space], axis=-2)


class FactorisedBlock(Block):
    """Attention over space, attention over time, MLP, each with its norm and residual sum.

    This is the block of ViViT's factorised self-attention (arXiv 2103.15691, model 3).
    """

    num_keys = 2 + Block.num_keys

    def __init__(
        self,
        spatial: nnx.Module,
        temporal: nnx.Module,
        *,
        dim: int,
        layer_scale: float | None = None,
        eps: float = 1e-6,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        **common: Any,
    ):
        """Builds the block around two attention layers.

        Args:
          spatial: the layer of the frames.
          temporal: the layer of the places.
          dim: as in `Block`.
          layer_scale: as in `Block`.
          eps: as in `Block`.
          dtype: as in `Block`.
          param_dtype: as in `Block`.
          rngs: as in `Block`.
          **common: the other arguments of `Block`.
        """
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        more = {"dim": dim, "layer_scale": layer_scale, "eps": eps}
        super().__init__(TemporalAttention(temporal), **more, **types, **common)
        self.spatial_norm = layer_norm(dim, eps=eps, **types)
        self.spatial_attention = SpatialAttention(spatial)
        has_scale = layer_scale is not None
        scale = {"init": layer_scale, "param_dtype": param_dtype}
        self.spatial_layer_scale = LayerScale(dim, **scale) if has_scale else None

    def __call__(
        self, x: Array, *, train: bool = False, keys: Array | None = None, **call: Any
    ) -> tuple[Array, Any]:
        """Runs the block on tokens [batch, frames * patches, dim], with `frames` in the call.

        Returns:
          The tokens after the block, and what the spatial and the temporal attention layer
          returned, a pair.
        """
        spatial = self.spatial_attention(
            self.spatial_norm(x), train=train, rng=key_at(keys, 0), **call
        )
        branch = spatial if self.spatial_layer_scale is None else self.spatial_layer_scale(spatial)
        x = x + self.drop_path(branch, train=train, rng=key_at(keys, 1))
        keys = None if keys is None else keys[2:]
        x, temporal = super().__call__(x, train=train, keys=keys, **call)
        return x, (spatial, temporal)


class RepeatedPositions(LearnedPositions):
    """Adds a learned vector for each place of the image, the same in every frame."""

    def __init__(self, *, grid: tuple[int, ...], **common: Any):
        """Builds the table of one frame of a grid (frames, rows, columns)."""
        super().__init__(grid=grid[1:], **common)

    def __call__(self, tokens: Array, *, grid: tuple[int, ...]) -> Array:
        """Adds the table to tokens [batch, prefix + frames * rows * columns, dim]."""
        self.check_grid(grid[1:])
        table = self.position_embedding[...].astype(tokens.dtype)
        prefix = table.shape[1] - self.grid[0] * self.grid[1]
        repeated = jnp.tile(table[:, prefix:], (1, grid[0], 1))
        return tokens + jnp.concatenate([table[:, :prefix], repeated], axis=1)
