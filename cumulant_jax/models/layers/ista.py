"""The block of CRATE: subspace attention compresses, a step of sparse coding sparsifies."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.block import LayerScale
from cumulant_jax.models.layers.dropout import DropPath, key_at
from cumulant_jax.models.layers.norms import layer_norm

#: The dictionary, as the published code starts it: uniform within sqrt(6 / dim) of zero.
_dictionary_init = jax.nn.initializers.he_uniform()


class ISTA(nnx.Module):
    """One step of iterative shrinkage-thresholding towards a sparse code of every token.

    With a learned dictionary D [dim, dim], step size t and sparsity s,

      out = relu(x + t Dᵀ (x − D x) − t s)

    which is a proximal gradient step, from x itself, on ½ |x − D z|² + s |z|₁ over z ≥ 0 (CRATE,
    arXiv 2306.01129, the ISTA block). It takes the place of the MLP and is no residual branch.
    """

    def __init__(
        self,
        *,
        dim: int,
        step_size: float,
        sparsity: float,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer; its `kernel` is D."""
        self.kernel = nnx.Param(_dictionary_init(rngs.params(), (dim, dim), param_dtype))
        self.step_size = step_size
        self.sparsity = sparsity
        self.dtype = dtype

    @jax.named_scope("ista")
    def __call__(self, x: Array) -> Array:
        """Maps every token of x [..., dim] by itself."""
        dictionary = self.kernel[...].astype(self.dtype)
        x = x.astype(self.dtype)
        # Tokens are rows here, so D x is x @ Dᵀ.
        residual = x - x @ dictionary.T
        step = self.step_size * (residual @ dictionary) - self.step_size * self.sparsity
        return jax.nn.relu(x + step)


class CRATEBlock(nnx.Module):
    """x + scale(attention(norm(x))), then ista(norm(x)); drop path on the attention branch."""

    #: How many keys one call takes in training.
    num_keys = 2

    def __init__(
        self,
        attention: nnx.Module,
        *,
        dim: int,
        step_size: float,
        sparsity: float,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        eps: float = 1e-5,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the block around an attention layer.

        Args:
          attention: a layer of `cumulant_jax.models.layers.attention`, called as layer(x,
            train=..., rng=...).
          dim: features of a token.
          step_size: of the ISTA step.
          sparsity: weight of the l1 norm in the ISTA step.
          layer_scale: where LayerScale on the attention branch starts; None leaves it out.
          drop_path: probability that the attention branch is dropped for an example.
          eps: epsilon of the norms.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm1 = layer_norm(dim, eps=eps, **types)
        self.attention = attention
        self.norm2 = layer_norm(dim, eps=eps, **types)
        self.ista = ISTA(dim=dim, step_size=step_size, sparsity=sparsity, **types)
        self.drop_path = DropPath(drop_path)
        self.layer_scale = (
            None
            if layer_scale is None
            else LayerScale(dim, init=layer_scale, param_dtype=param_dtype)
        )

    def __call__(
        self, x: Array, *, train: bool = False, keys: Array | None = None
    ) -> tuple[Array, Array]:
        """Runs the block on tokens [batch, tokens, dim].

        Returns:
          The tokens after the block, and what the attention layer returned, both of that shape.
        """
        attended = self.attention(self.norm1(x), train=train, rng=key_at(keys, 0))
        branch = attended if self.layer_scale is None else self.layer_scale(attended)
        x = x + self.drop_path(branch, train=train, rng=key_at(keys, 1))
        return self.ista(self.norm2(x)), attended
