"""The vision transformer, with any attention in its blocks."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_block, layer_types
from cumulant_jax.models.call_checks import check_images, split_key
from cumulant_jax.models.layers.block import Block, block_keys, run_block
from cumulant_jax.models.layers.dropout import key_at, linear_rates
from cumulant_jax.models.layers.head import Head
from cumulant_jax.models.layers.initializers import class_token_init
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.patch_embedding import PatchEmbedding
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.vit_options import ViTOptions


class ViT(nnx.Module):
    """Vision transformer (arXiv 2010.11929) as timm builds it.

    patch embedding -> class token -> positions -> blocks -> norm and pooling -> head. `ViTOptions`
    says what each can be and which defaults are timm's. Blocks are pre-norm and the GELU is exact.
    Weights are initialised as in timm, see `layers/initializers.py`.

    The module is a plain tree of arrays: split it with `nnx.split`, and merge it inside a jitted
    or differentiated pure function.

    >>> options = ViTOptions(image_size=8, patch_size=2, channels=1, dim=16, depth=1, heads=2,
    ...                      num_classes=10)
    >>> model = ViT(options, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 8, 8, 1))).shape
    (3, 10)
    """

    def __init__(self, options: ViTOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, ViTOptions):
            raise TypeError(f"options must be a ViTOptions, got {type(options).__name__}")
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        self.options = options
        self.patch_embedding = PatchEmbedding(
            patch_size=checks.size_pair("patch_size", options.patch_size),
            channels=options.channels,
            dim=options.dim,
            **types,
        )
        token = class_token_init(rngs.params(), (1, 1, options.dim), types["param_dtype"])
        self.class_token = nnx.Param(token) if options.class_token else None
        self.positions = POSITIONS[options.position](
            grid=options.grid,
            prefix_tokens=int(bool(options.class_token)),
            dim=options.dim,
            param_dtype=types["param_dtype"],
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(options.dropout)
        hidden_dim = int(options.dim * options.mlp_ratio)
        rates = linear_rates(options.drop_path, options.depth)
        self.blocks = nnx.List(
            [
                build_block(options, index, drop_path=rate, hidden_dim=hidden_dim, **types)
                for index, rate in enumerate(rates)
            ]
        )
        self.norm = layer_norm(options.dim, eps=options.eps, **types)
        self.head = Head(options.dim, options.num_classes, **types) if options.num_classes else None

    def __call__(
        self,
        images: Array,
        *,
        train: bool = False,
        rng: Array | None = None,
        return_intermediates: bool = False,
    ) -> Array | tuple[Array, dict[str, Array]]:
        """Classifies images.

        Args:
          images: floats [batch, height, width, channels], already normalised; the batch may be
            empty.
          train: whether dropout and drop path act.
          rng: a JAX random key; needed in training when a drop rate is above zero.
          return_intermediates: whether to return what is inside as well.

        Returns:
          Logits [batch, num_classes] in float32 at least, or with num_classes=0 the pooled
          features [batch, dim]. With `return_intermediates` a pair of that and a dict:
          "patch_embedding" [batch, patches, dim] before positions; "embed" [batch, tokens, dim],
          the input of the first block; for each block i "block_i", its output, and "attention_i",
          what its attention layer returned before LayerScale and drop path; "pre_logits"
          [batch, dim], what the head sees.

        Raises:
          ValueError: images of a wrong shape, or no `rng` where one is needed.
          TypeError: images that are not floats, an `rng` that is not one key, or a `train` or
            `return_intermediates` that is not a bool.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        options = self.options
        multiple = checks.size_pair("patch_size", options.patch_size)
        check_images(images, channels=options.channels, multiple=multiple)
        count = 1 + options.depth * Block.num_keys
        keys = split_key(rng, count, train=train, rates=options.drop_rates)
        patches = self.patch_embedding(images)
        x = self._embed(patches, self._grid(images))
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside = {"patch_embedding": patches, "embed": x}
        for index, block in enumerate(self.blocks):
            its_keys = block_keys(keys, index, Block.num_keys)
            x, inside[f"attention_{index}"] = run_block(
                block, x, train=train, keys=its_keys, remat=options.remat
            )
            inside[f"block_{index}"] = x
        features = self._pool(x)
        inside["pre_logits"] = features
        features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
        logits = features if self.head is None else self.head(features)
        return (logits, inside) if return_intermediates else logits

    def _grid(self, images: Array) -> tuple[int, int]:
        rows, columns = checks.size_pair("patch_size", self.options.patch_size)
        return images.shape[1] // rows, images.shape[2] // columns

    def _embed(self, patches: Array, grid: tuple[int, int]) -> Array:
        if self.class_token is not None:
            token = self.class_token[...].astype(patches.dtype)
            token = jnp.broadcast_to(token, (patches.shape[0], 1, patches.shape[-1]))
            patches = jnp.concatenate([token, patches], axis=1)
        return self.positions(patches, grid=grid)

    def _pool(self, x: Array) -> Array:
        x = x if self.options.fc_norm else self.norm(x)
        if self.options.pool == "token":
            pooled = x[:, 0]
        else:
            patches = x[:, 1:] if self.options.class_token else x
            pooled = patches.mean(axis=1, dtype=jnp.promote_types(x.dtype, jnp.float32))
            pooled = pooled.astype(x.dtype)
        return self.norm(pooled) if self.options.fc_norm else pooled
