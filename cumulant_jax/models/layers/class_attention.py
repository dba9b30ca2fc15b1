"""Class attention: a class token gathers from the patches after the blocks."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.attention import softmax_attention
from cumulant_jax.models.layers.block import LayerScale
from cumulant_jax.models.layers.dropout import key_at
from cumulant_jax.models.layers.initializers import bias_init, weight_init
from cumulant_jax.models.layers.mlp import MLP
from cumulant_jax.models.layers.norms import layer_norm


class ClassAttention(nnx.Module):
    """Softmax attention of one query, the class token, to all tokens (CaiT, arXiv 2103.17239).

    Time is linear in the tokens, as there is a single query.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        qkv_bias: bool = True,
        projection_dropout: float = 0.0,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the projections; arguments as in the other attention layers.

        The query has a projection of its own, as it comes from one token: the first `dim` of the
        3 * dim columns that a checkpoint of ToST or XCiT holds.
        """
        linear = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": weight_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.query = nnx.Linear(dim, dim, use_bias=qkv_bias, **linear)
        self.key_value = nnx.Linear(dim, 2 * dim, use_bias=qkv_bias, **linear)
        self.out = nnx.Linear(dim, dim, **linear)
        self.dropout = nnx.Dropout(projection_dropout)
        self.heads = heads

    def __call__(self, x: Array, *, train: bool = False, rng: Array | None = None) -> Array:
        """Maps tokens [batch, 1 + patches, dim], the class token first, to [batch, 1, dim]."""
        batch, tokens, dim = x.shape
        query = self.query(x[:, :1]).reshape(batch, 1, self.heads, dim // self.heads)
        key, value = (
            part.reshape(batch, tokens, self.heads, dim // self.heads)
            for part in jnp.split(self.key_value(x), 2, axis=-1)
        )
        attended = softmax_attention(query, key, value).reshape(batch, 1, dim)
        return self.dropout(self.out(attended), deterministic=not train, rngs=rng)


class ClassAttentionBlock(nnx.Module):
    """The block around `ClassAttention` in XCiT and ToST: attention and MLP for the class token.

    With u = norm1(x), for the class token c and the patches p:

      x <- x + scale1 * [attention(u) for c, u for p]
      x <- norm2(x): of all tokens, or with tokens_norm=False of c alone. This replaces the stream.
      c <- c + scale2 * mlp(c);  p <- 2 p

    What happens to the patches is how the published code came to be, not a choice its paper names;
    weights trained with it need it. With update_patches=False the patches only pass norm2.
    """

    #: How many keys one call takes in training.
    num_keys = 3

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        hidden_dim: int,
        qkv_bias: bool = True,
        layer_scale: float | None = None,
        tokens_norm: bool = True,
        update_patches: bool = True,
        dropout: float = 0.0,
        projection_dropout: float = 0.0,
        eps: float = 1e-6,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the block.

        Args:
          dim: features of a token.
          heads: number of heads.
          hidden_dim: features between the two linear layers of the MLP.
          qkv_bias: whether the projections to query, key and value have a bias.
          layer_scale: where LayerScale starts; None leaves it out.
          tokens_norm: whether the second norm acts on the patches too.
          update_patches: whether the patches take part in the residual sums.
          dropout: dropout rate inside the MLP.
          projection_dropout: dropout rate after the output projection of the attention.
          eps: epsilon of the norms.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm1 = layer_norm(dim, eps=eps, **types)
        self.attention = ClassAttention(
            dim=dim, heads=heads, qkv_bias=qkv_bias, projection_dropout=projection_dropout, **types
        )
        self.norm2 = layer_norm(dim, eps=eps, **types)
        self.mlp = MLP(dim=dim, hidden_dim=hidden_dim, dropout=dropout, **types)
        has_scale = layer_scale is not None
        scale = {"init": layer_scale, "param_dtype": param_dtype}
        self.layer_scale1 = LayerScale(dim, **scale) if has_scale else None
        self.layer_scale2 = LayerScale(dim, **scale) if has_scale else None
        self.tokens_norm = tokens_norm
        self.update_patches = update_patches

    @jax.named_scope("class_blocks")
    def __call__(self, x: Array, *, train: bool = False, keys: Array | None = None) -> Array:
        """Runs the block on tokens [batch, 1 + patches, dim], the class token first."""
        normed = self.norm1(x)
        attended = self.attention(normed, train=train, rng=key_at(keys, 0))
        token, patches = x[:, :1], x[:, 1:]
        token = token + _scaled(self.layer_scale1, attended)
        if self.update_patches:
            patches = patches + _scaled(self.layer_scale1, normed[:, 1:])
        token = self.norm2(token)
        patches = self.norm2(patches) if self.tokens_norm else patches
        branch = self.mlp(token, train=train, keys=None if keys is None else keys[1:3])
        token = token + _scaled(self.layer_scale2, branch)
        patches = 2 * patches if self.update_patches else patches
        return jnp.concatenate([token, patches], axis=1)


def _scaled(scale: LayerScale | None, branch: Array) -> Array:
    return branch if scale is None else scale(branch)
