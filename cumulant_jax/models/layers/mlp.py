"""The feed-forward half of a transformer block."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.dropout import key_at
from cumulant_jax.models.layers.initializers import bias_init, weight_init
from cumulant_jax.models.layout import constrain

#: The exact GELU, and the approximation of the published ViT, ViViT and GPT-2.
GELUS = ("erf", "tanh")


class MLP(nnx.Module):
    """Linear, GELU (exact by default), linear, with dropout after each."""

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        dropout: float = 0.0,
        gelu: str = "erf",
        bias: bool = True,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the layer: dim -> hidden_dim -> dim."""
        linear = {
            "use_bias": bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": weight_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.expand = nnx.Linear(dim, hidden_dim, **linear)
        self.contract = nnx.Linear(hidden_dim, dim, **linear)
        self.dropout = nnx.Dropout(dropout)
        self.gelu = gelu

    @jax.named_scope("mlp")
    def __call__(self, x: Array, *, train: bool = False, keys: Array | None = None) -> Array:
        """Maps every token of x [..., dim] by itself; training with dropout needs 2 keys."""
        x = self.expand(x)
        if x.ndim == 3:
            x = constrain(x, "batch", "tokens", "hidden")
        x = jax.nn.gelu(x, approximate=self.gelu == "tanh")
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        return self.dropout(self.contract(x), deterministic=not train, rngs=key_at(keys, 1))
