"""A video model that starts from an image model."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.positions import resize_positions
from cumulant_jax.models.layers.tubelet_embedding import inflate_kernel
from cumulant_jax.models.vit import ViT
from cumulant_jax.models.vivit import ViViT
from cumulant_jax.models.vivit_options import ViViTOptions

_SHARED = (
    "image_size",
    "patch_size",
    "channels",
    "dim",
    "depth",
    "heads",
    "attention",
    "attention_options",
    "qkv_bias",
    "qk_norm",
    "query_scale",
    "layer_scale",
    "mlp_ratio",
    "position",
    "dtype",
    "param_dtype",
    "eps",
)
_SPATIAL = {
    "spatial_norm": ("norm1",),
    "spatial_attention": ("attention",),
    "spatial_layer_scale": ("layer_scale1",),
}


def vivit_from_vit(
    vit: ViT, *, rngs: nnx.Rngs, inflation: str = "central", **options: Any
) -> ViViT:
    """Makes a video model whose space is that of an image model, as ViViT is trained.

    The tubelet embedding is inflated from the patch embedding; the position table is repeated over
    the frames (and resized for another image size); blocks, class token and norm are the image
    model's. What it has none of starts fresh: the head, the second encoder of
    factorisation="encoder", and the attention over time of "self_attention", whose output starts at
    zero, so that its residual branch starts as nothing.

    Args:
      vit: with learned positions, or none.
      rngs: the keys of what starts fresh.
      inflation: "central" or "average", see `inflate_kernel`.
      **options: of `ViViTOptions`, such as `frames`, `factorisation` and `num_classes`. What they
        leave out is as in the image model where it has it.

    Returns:
      The video model.

    Raises:
      ValueError: the image model's positions are of another kind, or an option is wrong.
      TypeError: not a ViT.

    Source:
      Arnab et al., "ViViT", arXiv 2103.15691, section 3.4.

    >>> from cumulant_jax import models
    >>> vit = models.create("vit_nano16", image_size=32, rngs=nnx.Rngs(0))
    >>> vivit = vivit_from_vit(vit, frames=8, num_classes=10, rngs=nnx.Rngs(1))
    >>> vivit(jnp.zeros((2, 8, 32, 32, 3))).shape
    (2, 10)
    """
    if not isinstance(vit, ViT):
        raise TypeError(f"vit must be a ViT, got {type(vit).__name__}")
    if vit.options.position not in ("learned", "none"):
        raise ValueError(
            f"vit must have position='learned' or 'none', got {vit.options.position!r}, which a "
            "ViViT does not have"
        )
    own = {name: getattr(vit.options, name) for name in _SHARED} | {"gelu": "erf"}
    if options.get("factorisation", "joint") in ("joint", "encoder"):
        own["pool"] = vit.options.pool
    model = ViViT(ViViTOptions(**{**own, **options}), rngs=rngs)
    source = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(vit))}
    state = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        state[path] = leaf.replace(_start(model, vit, source, path, leaf[...], inflation))
    nnx.update(model, nnx.from_flat_state(state))
    return model


def _start(
    model: ViViT,
    vit: ViT,
    source: dict[tuple[Any, ...], Array],
    path: tuple[Any, ...],
    fresh: Array,
    inflation: str,
) -> Array:
    """What the parameter at a path starts from."""
    first, *rest = path
    if path == ("tubelet_embedding", "kernel"):
        kernel = source["patch_embedding", "kernel"]
        return inflate_kernel(kernel, model.options.tubelet_frames, method=inflation)
    if first == "tubelet_embedding":
        return source["patch_embedding", *rest]
    if first == "positions":
        return _position_table(model, vit, source[path], fresh)
    if first in ("head", "temporal"):
        return fresh
    if first == "blocks" and model.options.factorisation == "self_attention":
        return _factorised(source, path, fresh)
    return source.get(path, fresh)


def _factorised(source: dict[tuple[Any, ...], Array], path: tuple[Any, ...], fresh: Array) -> Array:
    blocks, index, part, *rest = path
    if part in _SPATIAL:
        rest = rest[1:] if part == "spatial_attention" else rest  # the wrapper's `layer`
        return source[blocks, index, *_SPATIAL[part], *rest]
    if part == "attention" and "out" in rest:
        return jnp.zeros_like(fresh)
    if part in ("attention", "norm1", "layer_scale1"):
        return fresh
    return source[path]


def _position_table(model: ViViT, vit: ViT, table: Array, fresh: Array) -> Array:
    grid = tuple(model.options.grid[1:])
    prefix = 0 if vit.class_token is None else 1
    table = resize_positions(table, old_grid=vit.options.grid, new_grid=grid, prefix_tokens=prefix)
    patches = table[:, prefix:]
    token = jnp.zeros_like(patches[:, :0])
    if model.class_token is not None:
        token = table[:, :1] if prefix else fresh[:, :1]
    repeats = (fresh.shape[1] - token.shape[1]) // patches.shape[1]
    return jnp.concatenate([token, jnp.tile(patches, (1, repeats, 1))], axis=1)
