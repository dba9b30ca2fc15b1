"""A stack of transformer blocks: how it is built from options, run, and given its random keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.layers.attention import AttentionKind, attention_layer
from cumulant_jax.models.layers.block import Block
from cumulant_jax.models.transformer_options import TransformerOptions


def types_of(options: TransformerOptions, rngs: nnx.Rngs) -> dict[str, Any]:
    """The keyword arguments dtype, param_dtype and rngs that every layer takes."""
    return {
        "dtype": jnp.dtype(options.dtype),
        "param_dtype": jnp.dtype(options.param_dtype),
        "rngs": rngs,
    }


def build_attention(
    options: TransformerOptions,
    kind: AttentionKind,
    *,
    rngs: nnx.Rngs,
    function_options: Any = None,
    **more: Any,
) -> Any:
    """The attention layer of a kind, with what the options say about all attention layers.

    Args:
      options: of the model.
      kind: a name of `attention_kinds()` or an attention function.
      rngs: the keys of the initialisation.
      function_options: keyword arguments of the attention function.
      **more: further arguments of `attention_layer`.
    """
    return attention_layer(
        kind,
        dim=options.dim,
        heads=options.heads,
        options=function_options,
        qkv_bias=options.qkv_bias,
        out_bias=options.bias,
        qk_norm=options.qk_norm,
        query_scale=options.query_scale,
        projection_dropout=options.projection_dropout,
        eps=options.eps,
        **more,
        **types_of(options, rngs),
    )


def build_block(
    options: TransformerOptions, attention: nnx.Module, *, drop_path: float, rngs: nnx.Rngs
) -> Block:
    """A block around an attention layer, with what the options say about all blocks."""
    return Block(
        attention,
        dim=options.dim,
        hidden_dim=int(options.dim * options.mlp_ratio),
        layer_scale=options.layer_scale,
        drop_path=drop_path,
        dropout=options.dropout,
        gelu=options.gelu,
        bias=options.bias,
        eps=options.eps,
        **types_of(options, rngs),
    )


def build_blocks(
    options: TransformerOptions,
    *,
    rngs: nnx.Rngs,
    make_attention: Callable[..., Any] = build_attention,
    **more: Any,
) -> nnx.List[Block]:
    """The blocks of a model, each with its own attention kind; drop path rises over the depth.

    Args:
      options: of the model.
      rngs: the keys of the initialisation.
      make_attention: `build_attention`, or a function of its signature.
      **more: further arguments of `attention_layer`.
    """
    kinds, entries = options.attention_per_block, options.attention_options_per_block
    blocks = []
    for index, (kind, entry) in enumerate(zip(kinds, entries, strict=True)):
        layer = make_attention(options, kind, rngs=rngs, function_options=entry, **more)
        rate = drop_path_rate(options.drop_path, index, options.depth)
        blocks.append(build_block(options, layer, drop_path=rate, rngs=rngs))
    return nnx.List(blocks)


def drop_path_rate(last: float, index: int, depth: int) -> float:
    """The rate of block `index`, which rises linearly from 0 in the first to `last`.

    >>> [drop_path_rate(0.2, index, 3) for index in range(3)]
    [0.0, 0.1, 0.2]
    """
    return last * index / max(depth - 1, 1)


def run_blocks(
    blocks: Any,
    x: Array,
    *,
    train: bool,
    keys: Array | None,
    remat: bool,
    inside: dict[str, Array] | None = None,
    prefix: str = "",
    **call: Any,
) -> Array:
    """Runs blocks one after the other.

    Args:
      blocks: the blocks, each called as block(x, train=..., keys=..., **call).
      x: tokens [batch, tokens, dim].
      train: whether dropout and drop path act.
      keys: `num_keys` of each block, one block after the other, or None.
      remat: whether the backward pass recomputes what is inside a block.
      inside: where to put "block_i" and "attention_i" of each block, or None.
      prefix: stands before those names.
      **call: passed on to the attention layers.

    Returns:
      The tokens after the last block [batch, tokens, dim].
    """
    run = _run_remat if remat else _run
    first = 0
    for index, block in enumerate(blocks):
        block_keys = None if keys is None else keys[first : first + block.num_keys]
        first += block.num_keys
        x, attended = run(block, x, train, block_keys, call)
        if inside is not None:
            inside[f"{prefix}attention_{index}"] = attended
            inside[f"{prefix}block_{index}"] = x
    return x


def _run(block: Any, x: Array, train: bool, keys: Array | None, call: dict) -> tuple[Array, Array]:
    return block(x, train=train, keys=keys, **call)


def _run_remat(
    block: Any, x: Array, train: bool, keys: Array | None, call: dict
) -> tuple[Array, Array]:
    # jax.checkpoint wants a pure function: it gets the block's arrays and puts the module together
    # inside.
    graphdef, state = nnx.split(block)

    def run(state: nnx.State, x: Array, keys: Array | None) -> tuple[Array, Array]:
        return nnx.merge(graphdef, state)(x, train=train, keys=keys, **call)

    return jax.checkpoint(run)(state, x, keys)


def split_keys(
    options: TransformerOptions, count: int, *, train: bool, rng: Array | None
) -> Array | None:
    """All `count` keys of one call of a model; None where nothing is random.

    Raises:
      ValueError: a rate is above zero in training, and there is no key.
      TypeError: the key is none.
    """
    if rng is not None:
        checks.check_key("rng", rng)
    rates = ("dropout", "projection_dropout", "drop_path")
    active = [name for name in rates if getattr(options, name) > 0] if train else []
    if not active:
        return None
    if rng is None:
        raise ValueError(
            f"rng must be a key when train=True and {active[0]} is above 0, got None: "
            "pass jax.random.key(seed), a new one at each step"
        )
    return jax.random.split(rng, count)
