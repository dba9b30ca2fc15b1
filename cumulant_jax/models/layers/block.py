"""The pre-norm transformer block and how a model runs it."""

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.dropout import DropPath, key_at
from cumulant_jax.models.layers.mlp import MLP
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layout import constrain


class LayerScale(nnx.Module):
    """A learned factor per feature on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, dim: int, *, init: float, param_dtype: jnp.dtype):
        """Starts `gamma` [dim] at `init`."""
        self.gamma = nnx.Param(jnp.full((dim,), init, param_dtype))

    def __call__(self, x: Array) -> Array:
        """Multiplies x [..., dim] by gamma."""
        return x * self.gamma[...].astype(x.dtype)


class Block(nnx.Module):
    """x + scale(attention(norm(x))), then x + scale(mlp(norm(x))); drop path on each branch."""

    #: How many keys one call takes in training.
    num_keys = 5

    def __init__(
        self,
        attention: nnx.Module,
        *,
        dim: int,
        hidden_dim: int,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        gelu: str = "erf",
        bias: bool = True,
        eps: float = 1e-6,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the block around an attention layer.

        Args:
          attention: a layer of `cumulant_jax.models.layers.attention`, called as layer(x,
            train=..., rng=...).
          dim: features of a token.
          hidden_dim: features between the two linear layers of the MLP.
          layer_scale: where LayerScale starts; None leaves it out.
          drop_path: probability that a branch is dropped for an example.
          dropout: dropout rate inside the MLP.
          gelu: "erf" or "tanh", the MLP's.
          bias: whether the norms and the MLP have biases.
          eps: epsilon of the norms.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm1 = layer_norm(dim, eps=eps, bias=bias, **types)
        self.attention: Any = attention
        self.norm2 = layer_norm(dim, eps=eps, bias=bias, **types)
        self.mlp = MLP(
            dim=dim, hidden_dim=hidden_dim, dropout=dropout, gelu=gelu, bias=bias, **types
        )
        self.drop_path = DropPath(drop_path)
        has_scale = layer_scale is not None
        scale = {"init": layer_scale, "param_dtype": param_dtype}
        self.layer_scale1 = LayerScale(dim, **scale) if has_scale else None
        self.layer_scale2 = LayerScale(dim, **scale) if has_scale else None

    def __call__(
        self, x: Array, *, train: bool = False, keys: Array | None = None, **call: Any
    ) -> tuple[Array, Array]:
        """Runs the block.

        Args:
          x: tokens [batch, tokens, dim].
          train: whether dropout and drop path act.
          keys: `num_keys` keys, needed in training where a rate is above zero.
          **call: passed on to the attention layer, such as `mask` or `is_causal`.

        Returns:
          The tokens after the block, and what the attention layer returned (before LayerScale and
          drop path), both [batch, tokens, dim].
        """
        attended = self.attention(self.norm1(x), train=train, rng=key_at(keys, 0), **call)
        return self._add_branches(x, attended, train, keys), attended

    def extend(self, x: Array, state: Any, **call: Any) -> tuple[Array, Any]:
        """Runs the block on tokens that come after those of a state, as `extend` of its layer.

        Returns:
          The tokens after the block [batch, tokens, dim], and the state after the last one.
        """
        attended, state = self.attention.extend(self.norm1(x), state, **call)
        return self._add_branches(x, attended, False, None), state

    def _add_branches(self, x: Array, attended: Array, train: bool, keys: Array | None) -> Array:
        branch = attended if self.layer_scale1 is None else self.layer_scale1(attended)
        x = x + self.drop_path(branch, train=train, rng=key_at(keys, 1))
        branch = self.mlp(self.norm2(x), train=train, keys=None if keys is None else keys[2:4])
        branch = branch if self.layer_scale2 is None else self.layer_scale2(branch)
        return x + self.drop_path(branch, train=train, rng=key_at(keys, 4))


#: What the backward pass keeps of a block: with "full" only its input, with "dots" the results of
#: its linear layers too, so that only cheap work is done again.
REMAT_POLICIES = MappingProxyType(
    {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
)


def run_block(
    block: Any, x: Array, *, train: bool, keys: Array | None, remat: bool | str, **call: Any
) -> Any:
    """Runs one block of a model.

    Args:
      block: a module, called as block(x, train=..., keys=..., **call).
      x: tokens [batch, tokens, dim].
      train: whether dropout and drop path act.
      keys: the keys of this block, or None.
      remat: whether the backward pass computes what is inside anew instead of keeping it: a name
        of `REMAT_POLICIES`, or True for "full".
      **call: what the block passes on to its attention layer, such as `mask`.

    Returns:
      What the block returns.
    """
    x = constrain(x, "batch", "tokens", None)
    if not remat:
        return block(x, train=train, keys=keys, **call)
    # jax.checkpoint wants a pure function: it gets the block's arrays and puts the module together
    # inside.
    graphdef, state = nnx.split(block)

    def run(state: nnx.State, x: Array, keys: Array | None) -> Any:
        return nnx.merge(graphdef, state)(x, train=train, keys=keys, **call)

    policy = REMAT_POLICIES["full" if remat is True else remat]
    return jax.checkpoint(run, policy=policy)(state, x, keys)


def block_keys(keys: Array | None, index: int, per_block: int, *, first: int = 1) -> Array | None:
    """The keys of block `index` among all keys of a call, of which `first` come before the blocks.

    >>> block_keys(jnp.arange(11), 1, 5)
    Array([ 6,  7,  8,  9, 10], dtype=int32)
    """
    start = first + index * per_block
    return None if keys is None else keys[start : start + per_block]


def run_blocks(
    blocks: Any,
    x: Array,
    *,
    keys: Array | None,
    inside: dict[str, Array],
    prefix: str = "",
    **call: Any,
) -> Array:
    """Runs blocks one after the other.

    Args:
      blocks: modules of `num_keys` keys each, called as `run_block` does; each returns its tokens
        and what its attention layer returned.
      x: tokens [batch, tokens, dim].
      keys: the keys of all blocks, one block's after the other's, or None.
      inside: takes "block_i" and "attention_i" of each block.
      prefix: stands before those names.
      **call: the other arguments of `run_block`.

    Returns:
      The tokens after the last block [batch, tokens, dim].
    """
    for index, block in enumerate(blocks):
        its_keys = block_keys(keys, index, block.num_keys, first=0)
        x, inside[f"{prefix}attention_{index}"] = run_block(block, x, keys=its_keys, **call)
        inside[f"{prefix}block_{index}"] = x
    return x
