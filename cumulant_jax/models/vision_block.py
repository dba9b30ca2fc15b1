"""The attention layer and the transformer block that a record of options describes."""

from typing import Any

from flax import nnx

from cumulant_jax.models.layers.attention import attention_layer
from cumulant_jax.models.layers.block import Block
from cumulant_jax.models.vision_options import VisionOptions


def vision_attention(options: VisionOptions, index: int, **types: Any) -> nnx.Module:
    """Builds the attention layer of block `index`.

    Args:
      options: of the model.
      index: of the block.
      **types: `dtype`, `param_dtype` and `rngs`, as for every layer.

    Returns:
      The layer, called as layer(x, train=..., rng=...).
    """
    return attention_layer(
        options.attention_per_block[index],
        dim=options.dim,
        heads=options.heads,
        options=options.attention_options_per_block[index],
        qkv_bias=options.qkv_bias,
        qk_norm=options.qk_norm,
        query_scale=options.query_scale,
        projection_dropout=options.projection_dropout,
        eps=options.eps,
        **types,
    )


def vision_block(
    options: VisionOptions, index: int, *, hidden_dim: int, drop_path: float, **types: Any
) -> Block:
    """Builds block `index` of a model.

    Args:
      options: of the model.
      index: of the block, which decides its attention.
      hidden_dim: features between the two linear layers of its MLP.
      drop_path: its probability of dropping a branch.
      **types: `dtype`, `param_dtype` and `rngs`, as for every layer.

    Returns:
      The block.
    """
    return Block(
        vision_attention(options, index, **types),
        dim=options.dim,
        hidden_dim=hidden_dim,
        layer_scale=options.layer_scale,
        drop_path=drop_path,
        dropout=options.dropout,
        eps=options.eps,
        **types,
    )
