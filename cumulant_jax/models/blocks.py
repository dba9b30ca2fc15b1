"""The attention layer and the transformer block that a record of options describes."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from cumulant_jax.models.layers.attention import attention_layer
from cumulant_jax.models.layers.block import Block
from cumulant_jax.models.transformer_options import TransformerOptions


def layer_types(options: TransformerOptions, rngs: nnx.Rngs) -> dict[str, Any]:
    """The `dtype`, `param_dtype` and `rngs` that every layer takes."""
    return {
        "dtype": jnp.dtype(options.dtype),
        "param_dtype": jnp.dtype(options.param_dtype),
        "rngs": rngs,
    }


def build_attention(options: TransformerOptions, index: int, **more: Any) -> Any:
    """Builds the attention layer of block `index`.

    Args:
      options: of the model.
      index: of the block.
      **more: `dtype`, `param_dtype` and `rngs`, as for every layer, and further arguments of
        `attention_layer`.

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
        **more,
    )


def build_block(
    options: TransformerOptions,
    index: int,
    *,
    hidden_dim: int,
    drop_path: float,
    attention: nnx.Module | None = None,
    gelu: str = "erf",
    bias: bool = True,
    **types: Any,
) -> Block:
    """Builds block `index` of a model.

    Args:
      options: of the model.
      index: of the block, which decides its attention.
      hidden_dim: features between the two linear layers of its MLP.
      drop_path: its probability of dropping a branch.
      attention: its attention layer; None: that of `build_attention`.
      gelu: as in `Block`.
      bias: as in `Block`.
      **types: `dtype`, `param_dtype` and `rngs`, as for every layer.

    Returns:
      The block.
    """
    return Block(
        build_attention(options, index, **types) if attention is None else attention,
        dim=options.dim,
        hidden_dim=hidden_dim,
        layer_scale=options.layer_scale,
        drop_path=drop_path,
        dropout=options.dropout,
        gelu=gelu,
        bias=bias,
        eps=options.eps,
        **types,
    )
