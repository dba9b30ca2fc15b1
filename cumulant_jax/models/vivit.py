"""The video vision transformer, with any attention in its blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_attention, build_block, layer_types
from cumulant_jax.models.call_checks import split_key
from cumulant_jax.models.layers.block import run_blocks
from cumulant_jax.models.layers.dropout import key_at, linear_rates
from cumulant_jax.models.layers.head import Head
from cumulant_jax.models.layers.initializers import class_token_init
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.space_time import FactorisedBlock, SplitHeads, to_frames
from cumulant_jax.models.layers.tubelet_embedding import TubeletEmbedding
from cumulant_jax.models.vivit_options import VIDEO_POSITIONS, ViViTOptions


class _Encoder(nnx.Module):
    """Class token, positions, blocks, norm, pooling."""

    def __init__(
        self,
        options: ViViTOptions,
        *,
        blocks: nnx.List,
        position: str,
        grid: tuple[int, ...],
        types: dict[str, Any],
    ):
        token = class_token_init(types["rngs"].params(), (1, 1, options.dim), types["param_dtype"])
        has_token = options.pool == "token"
        self.class_token = nnx.Param(token) if has_token else None
        self.positions = VIDEO_POSITIONS[position](
            grid=grid,
            prefix_tokens=int(has_token),
            dim=options.dim,
            param_dtype=types["param_dtype"],
            rngs=types["rngs"],
        )
        self.dropout = nnx.Dropout(options.dropout)
        self.blocks = blocks
        self.norm = layer_norm(options.dim, eps=options.eps, **types)
        self.num_keys = 1 + sum(block.num_keys for block in blocks)

    def encode(
        self,
        x: Array,
        *,
        grid: tuple[int, ...],
        train: bool,
        keys: Array | None,
        inside: dict[str, Any],
        prefix: str = "",
        **call: Any,
    ) -> Array:
        """Maps tokens [batch, tokens, dim] on a grid to pooled features [batch, dim]."""
        if self.class_token is not None:
            token = self.class_token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        x = self.positions(x, grid=grid)
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside[f"{prefix}embed"] = x
        keys = None if keys is None else keys[1 : self.num_keys]
        x = run_blocks(self.blocks, x, train=train, keys=keys, inside=inside, prefix=prefix, **call)
        x = self.norm(x)
        if self.class_token is not None:
            return x[:, 0]
        return x.mean(axis=1, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


class ViViT(_Encoder):
    """Video vision transformer (arXiv 2103.15691), in its four published forms.

    Tubelet embedding -> class token -> positions -> blocks -> norm -> pooling -> head; with
    factorisation="encoder" the pooled features of the frames go through a second such encoder,
    `temporal`, before the head. `ViViTOptions` says what each can be. Blocks are pre-norm, the norm
    comes before pooling.

    >>> options = ViViTOptions(frames=4, image_size=8, patch_size=4, channels=1, dim=16, depth=1,
    ...                        heads=2, num_classes=10, factorisation="self_attention")
    >>> model = ViViT(options, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 4, 8, 8, 1))).shape
    (3, 10)
    """

    def __init__(self, options: ViViTOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, ViViTOptions):
            raise TypeError(f"options must be a ViViTOptions, got {type(options).__name__}")
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        self.options = options
        self.tubelet_embedding = TubeletEmbedding(
            tubelet=options.tubelet, channels=options.channels, dim=options.dim, **types
        )
        is_encoder = options.factorisation == "encoder"
        super().__init__(
            options,
            blocks=_BLOCKS[options.factorisation](options, types),
            position="learned" if is_encoder and options.position != "none" else options.position,
            grid=options.grid[1:] if is_encoder else options.grid,
            types=types,
        )
        self.temporal = _temporal_encoder(options, types) if is_encoder else None
        self.head = Head(options.dim, options.num_classes, **types) if options.num_classes else None

    def __call__(
        self,
        clips: Array,
        *,
        train: bool = False,
        rng: Array | None = None,
        return_intermediates: bool = False,
    ) -> Array | tuple[Array, dict[str, Any]]:
        """Classifies clips.

        Args:
          clips: floats [batch, frames, height, width, channels], already normalised; the batch may
            be empty.
          train: whether dropout and drop path act.
          rng: a JAX random key; needed in training when a drop rate is above zero.
          return_intermediates: whether to return what is inside as well.

        Returns:
          Logits [batch, num_classes] in float32 at least, or with num_classes=0 the pooled
          features [batch, dim]. With `return_intermediates` a pair of that and a dict:
          "tubelet_embedding" [batch, tubelets, dim] before positions; "embed", the input of the
          first block; for each block i "block_i", its output, and "attention_i", what its attention
          layer returned before LayerScale and drop path (with factorisation="self_attention" a
          pair: over space, over time); "pre_logits" [batch, dim], what the head sees. With
          factorisation="encoder" the batch of these is that of the frames, clip by clip, and the
          same names with "temporal_" before them are those of the second encoder.

        Raises:
          ValueError: clips of a wrong shape, or no `rng` where one is needed.
          TypeError: clips that are not floats, an `rng` that is not one key, or a `train` or
            `return_intermediates` that is not a bool.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        options = self.options
        _check_clips(clips, channels=options.channels, multiple=options.tubelet)
        count = self.num_keys + (0 if self.temporal is None else self.temporal.num_keys)
        keys = split_key(rng, count, train=train, rates=options.drop_rates)
        x = self.tubelet_embedding(clips)
        inside: dict[str, Any] = {"tubelet_embedding": x}
        frames, *image = (
            size // side for size, side in zip(clips.shape[1:4], options.tubelet, strict=True)
        )
        run: dict[str, Any] = {"train": train, "remat": options.remat, "inside": inside}
        if self.temporal is None:
            if options.factorisation != "joint":
                run["frames"] = frames
            features = self.encode(x, grid=(frames, *image), keys=keys, **run)
        else:
            x = self.encode(to_frames(x, frames), grid=tuple(image), keys=keys, **run)
            x = x.reshape(clips.shape[0], frames, options.dim)
            keys = None if keys is None else keys[self.num_keys :]
            features = self.temporal.encode(x, grid=(frames,), keys=keys, prefix="temporal_", **run)
        inside["pre_logits"] = features
        features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
        logits = features if self.head is None else self.head(features)
        return (logits, inside) if return_intermediates else logits


def _plain_blocks(options: ViViTOptions, types: dict[str, Any]) -> nnx.List:
    rates = linear_rates(options.drop_path, options.depth)
    return nnx.List(
        [
            build_block(options, index, drop_path=rate, **_mlp(options), **types)
            for index, rate in enumerate(rates)
        ]
    )


def _split_head_blocks(options: ViViTOptions, types: dict[str, Any]) -> nnx.List:
    blocks = _plain_blocks(options, types)
    for block in blocks:
        block.attention.function = SplitHeads(block.attention.function)
    return blocks


def _factorised_blocks(options: ViViTOptions, types: dict[str, Any]) -> nnx.List:
    temporal = options.temporal
    return nnx.List(
        [
            FactorisedBlock(
                build_attention(options, index, **types),
                build_attention(temporal, index, **types),
                dim=options.dim,
                layer_scale=options.layer_scale,
                drop_path=rate,
                dropout=options.dropout,
                eps=options.eps,
                **_mlp(options),
                **types,
            )
            for index, rate in enumerate(linear_rates(options.drop_path, options.depth))
        ]
    )


#: Name of a factorisation to the function that builds its blocks.
_BLOCKS = {
    "joint": _plain_blocks,
    "encoder": _plain_blocks,
    "self_attention": _factorised_blocks,
    "dot_product": _split_head_blocks,
}


def _temporal_encoder(options: ViViTOptions, types: dict[str, Any]) -> _Encoder:
    temporal = options.temporal
    blocks = [
        build_block(temporal, index, drop_path=rate, **_mlp(options), **types)
        for index, rate in enumerate(linear_rates(options.drop_path, temporal.depth))
    ]
    return _Encoder(
        options,
        blocks=nnx.List(blocks),
        position="none" if options.position == "none" else "learned",
        grid=options.grid[:1],
        types=types,
    )


def _mlp(options: ViViTOptions) -> dict[str, Any]:
    return {"hidden_dim": int(options.dim * options.mlp_ratio), "gelu": options.gelu}


def _check_clips(clips: Any, *, channels: int, multiple: tuple[int, int, int]) -> None:
    if not isinstance(clips, jax.Array | np.ndarray):
        raise TypeError(f"clips must be an array, got {type(clips).__name__}")
    shape = clips.shape
    fits = len(shape) == 5 and shape[4] == channels and 0 not in shape[1:4]
    if not fits or any(size % side for size, side in zip(shape[1:4], multiple, strict=True)):
        raise ValueError(
            f"clips must be [batch, frames, height, width, {channels}] with frames, height and "
            f"width positive multiples of {', '.join(map(str, multiple))}, got shape {shape}"
        )
    if not jnp.issubdtype(clips.dtype, jnp.floating):
        raise TypeError(f"clips must be normalised floats, got {clips.dtype}: scale them first")
