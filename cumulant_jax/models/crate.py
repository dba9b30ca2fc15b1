"""The white-box transformer CRATE."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_attention, layer_types
from cumulant_jax.models.call_checks import check_images, split_key
from cumulant_jax.models.crate_options import CRATEOptions
from cumulant_jax.models.layers.block import block_keys, run_block
from cumulant_jax.models.layers.dropout import key_at
from cumulant_jax.models.layers.head import Head
from cumulant_jax.models.layers.initializers import weight_init
from cumulant_jax.models.layers.ista import CRATEBlock
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.patch_embedding import NormedPatchEmbedding
from cumulant_jax.models.layers.positions import POSITIONS


class CRATE(nnx.Module):
    """Transformer whose layers are steps on the sparse rate reduction (arXiv 2306.01129).

    patch embedding with norms -> class token -> positions -> blocks -> pooling -> norm -> head. A
    block is multi-head subspace self-attention with a residual, then an ISTA step.
    `CRATEOptions` says what each can be; the defaults compute what the published code computes.
    Weights start as in the other models of this library (the published code starts the class token
    and the positions from a standard normal); the dictionaries start as published.

    >>> options = CRATEOptions(image_size=8, patch_size=2, channels=1, dim=16, depth=1, heads=2,
    ...                        num_classes=10)
    >>> model = CRATE(options, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 8, 8, 1))).shape
    (3, 10)
    """

    def __init__(self, options: CRATEOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, CRATEOptions):
            raise TypeError(f"options must be a CRATEOptions, got {type(options).__name__}")
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        self.options = options
        self.patch_embedding = NormedPatchEmbedding(
            patch_size=checks.size_pair("patch_size", options.patch_size),
            channels=options.channels,
            dim=options.dim,
            eps=options.eps,
            **types,
        )
        token = weight_init(rngs.params(), (1, 1, options.dim), types["param_dtype"])
        self.class_token = nnx.Param(token)
        self.positions = POSITIONS[options.position](
            grid=options.grid,
            prefix_tokens=1,
            dim=options.dim,
            param_dtype=types["param_dtype"],
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(options.dropout)
        self.blocks = nnx.List(
            [
                CRATEBlock(
                    build_attention(options, index, **types),
                    dim=options.dim,
                    step_size=options.step_size,
                    sparsity=options.sparsity,
                    layer_scale=options.layer_scale,
                    drop_path=options.drop_path,
                    eps=options.eps,
                    **types,
                )
                for index in range(options.depth)
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
          what its attention layer returned; "pre_logits" [batch, dim], what the head sees.

        Raises:
          ValueError: images of a wrong shape, or no `rng` where one is needed.
          TypeError: images that are not floats, an `rng` that is not one key, or a `train` or
            `return_intermediates` that is not a bool.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        options = self.options
        rows, columns = checks.size_pair("patch_size", options.patch_size)
        check_images(images, channels=options.channels, multiple=(rows, columns))
        count = 1 + options.depth * CRATEBlock.num_keys
        keys = split_key(rng, count, train=train, rates=options.drop_rates)
        patches = self.patch_embedding(images)
        token = self.class_token[...].astype(patches.dtype)
        token = jnp.broadcast_to(token, (patches.shape[0], 1, options.dim))
        grid = (images.shape[1] // rows, images.shape[2] // columns)
        x = self.positions(jnp.concatenate([token, patches], axis=1), grid=grid)
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside = {"patch_embedding": patches, "embed": x}
        for index, block in enumerate(self.blocks):
            its_keys = block_keys(keys, index, CRATEBlock.num_keys)
            x, inside[f"attention_{index}"] = run_block(
                block, x, train=train, keys=its_keys, remat=options.remat
            )
            inside[f"block_{index}"] = x
        wide = jnp.promote_types(x.dtype, jnp.float32)
        pooled = x[:, 0] if options.pool == "token" else x.mean(axis=1, dtype=wide)
        features = self.norm(pooled.astype(x.dtype))
        inside["pre_logits"] = features
        features = features.astype(wide)
        logits = features if self.head is None else self.head(features)
        return (logits, inside) if return_intermediates else logits
