"""The classifier at the end of a model."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from cumulant_jax.models.layers.initializers import bias_init, weight_init
from cumulant_jax.models.layout import constrain


class Head(nnx.Linear):
    """One linear map from pooled features to logits, in float32 at least.

    The head is a thousandth of the work, and its logits decide the loss.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the map: dim -> num_classes."""
        super().__init__(
            dim,
            num_classes,
            dtype=jnp.promote_types(dtype, jnp.float32),
            param_dtype=param_dtype,
            kernel_init=weight_init,
            bias_init=bias_init,
            rngs=rngs,
        )

    @jax.named_scope("head")
    def __call__(self, features: Array) -> Array:
        """Maps features [batch, dim] to logits [batch, num_classes]."""
        return super().__call__(constrain(features, "batch", None))
