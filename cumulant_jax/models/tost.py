"""The token statistics transformer for images, and XCiT and ViT on its skeleton."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_block, layer_types
from cumulant_jax.models.call_checks import check_images, split_key
from cumulant_jax.models.layers.block import Block, block_keys, run_block
from cumulant_jax.models.layers.class_attention import ClassAttentionBlock
from cumulant_jax.models.layers.conv_stem import ConvStem
from cumulant_jax.models.layers.dropout import key_at
from cumulant_jax.models.layers.head import Head
from cumulant_jax.models.layers.initializers import weight_init
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.positions import POSITIONS
from cumulant_jax.models.tost_options import SCHEDULES, ToSTOptions


class ToST(nnx.Module):
    """Token statistics transformer (arXiv 2412.17810) as its authors' code builds it.

    convolutional stem -> positions -> blocks -> class token in front -> class-attention blocks ->
    norm -> class token -> head. `ToSTOptions` says what each can be. Blocks are pre-norm with
    LayerScale and the GELU is exact. A model takes images of any size.

    The stem has batch norm. A call with train=True normalises by the batch and gives the module new
    running statistics, which are `nnx.BatchStat` variables; with train=False it uses them and
    changes nothing. In a jitted or differentiated function work on split state and return the
    statistics of the module after the call:

    >>> import jax
    >>> model = ToST(ToSTOptions(patch_size=4, dim=16, depth=1, heads=2, num_classes=10),
    ...              rngs=nnx.Rngs(0))
    >>> graphdef, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)
    >>> @jax.jit
    ... def loss_and_gradient(params, statistics, images):
    ...     def loss(params):
    ...         model = nnx.merge(graphdef, params, statistics)
    ...         logits = model(images, train=True)
    ...         return -jax.nn.log_softmax(logits)[:, 0].mean(), nnx.state(model, nnx.BatchStat)
    ...     return jax.value_and_grad(loss, has_aux=True)(params)
    >>> (loss, statistics), gradient = loss_and_gradient(params, statistics, jnp.ones((2, 8, 8, 3)))
    >>> nnx.update(model, statistics)
    >>> model(jnp.ones((2, 8, 8, 3))).shape
    (2, 10)
    """

    def __init__(self, options: ToSTOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, ToSTOptions):
            raise TypeError(f"options must be a ToSTOptions, got {type(options).__name__}")
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        self.options = options
        self.patch_embedding = ConvStem(
            patch_size=options.patch, channels=options.channels, dim=options.dim, **types
        )
        self.positions = POSITIONS[options.position](
            grid=options.grid,
            prefix_tokens=0,
            dim=options.dim,
            param_dtype=types["param_dtype"],
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(options.dropout)
        hidden_dim = int(options.dim * options.mlp_ratio)
        rates = SCHEDULES[options.drop_path_schedule](options.drop_path, options.depth)
        self.blocks = nnx.List(
            [
                build_block(options, index, drop_path=rate, hidden_dim=hidden_dim, **types)
                for index, rate in enumerate(rates)
            ]
        )
        token = weight_init(rngs.params(), (1, 1, options.dim), types["param_dtype"])
        self.class_token = nnx.Param(token)
        self.class_blocks = nnx.List(
            [_class_block(options, types) for _ in range(options.class_depth)]
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
          images: floats [batch, height, width, channels] of any size, already normalised; the batch
            may be empty.
          train: whether dropout and drop path act, and batch norm uses (and records) the statistics
            of this batch.
          rng: a JAX random key; needed in training when a drop rate is above zero.
          return_intermediates: whether to return what is inside as well.

        Returns:
          Logits [batch, num_classes] in float32 at least, or with num_classes=0 the class token's
          features [batch, dim]. With `return_intermediates` a pair of that and a dict:
          "patch_embedding" [batch, patches, dim] before positions; "embed", the same after them,
          the input of the first block; for each block i "block_i", its output, and "attention_i",
          what its attention layer returned before LayerScale and drop path; for each
          class-attention block "class_block_i" [batch, 1 + patches, dim]; "pre_logits"
          [batch, dim], what the head sees.

        Raises:
          ValueError: images of a wrong shape, or no `rng` where one is needed.
          TypeError: images that are not floats, an `rng` that is not one key, or a `train` or
            `return_intermediates` that is not a bool.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        options = self.options
        check_images(images, channels=options.channels)
        before_class = 1 + options.depth * Block.num_keys
        count = before_class + options.class_depth * ClassAttentionBlock.num_keys
        keys = split_key(rng, count, train=train, rates=options.drop_rates)
        patches = self.patch_embedding(images, train=train)
        grid = (-(-images.shape[1] // options.patch), -(-images.shape[2] // options.patch))
        x = self.positions(patches, grid=grid)
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside = {"patch_embedding": patches, "embed": x}
        for index, block in enumerate(self.blocks):
            its_keys = block_keys(keys, index, Block.num_keys)
            x, inside[f"attention_{index}"] = run_block(
                block, x, train=train, keys=its_keys, remat=options.remat
            )
            inside[f"block_{index}"] = x
        token = self.class_token[...].astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, x.shape[2])), x], axis=1)
        for index, block in enumerate(self.class_blocks):
            per_block = ClassAttentionBlock.num_keys
            its_keys = block_keys(keys, index, per_block, first=before_class)
            x = run_block(block, x, train=train, keys=its_keys, remat=options.remat)
            inside[f"class_block_{index}"] = x
        features = self.norm(x[:, 0])
        inside["pre_logits"] = features
        features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
        logits = features if self.head is None else self.head(features)
        return (logits, inside) if return_intermediates else logits


def _class_block(options: ToSTOptions, types: dict) -> ClassAttentionBlock:
    return ClassAttentionBlock(
        dim=options.dim,
        heads=options.heads,
        hidden_dim=int(options.dim * options.mlp_ratio),
        qkv_bias=options.qkv_bias,
        layer_scale=options.layer_scale,
        tokens_norm=options.tokens_norm,
        update_patches=options.update_patches,
        dropout=options.dropout,
        projection_dropout=options.projection_dropout,
        eps=options.eps,
        **types,
    )
