"""Batch normalisation with the statistics that PyTorch keeps."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class BatchNorm(nnx.Module):
    """Normalises every feature over all other axes (arXiv 1502.03167).

    In training with the mean and variance of the batch, in evaluation with running ones. The
    running variance is the unbiased one, as in PyTorch; Flax keeps the biased one. Under jit with a
    batch split over devices the statistics are those of the whole batch.

    A call in training gives the module new `mean` and `var`, which are `nnx.BatchStat` variables.
    In a pure function return the state of the module after the call:

    >>> layer = BatchNorm(3, momentum=0.5, dtype=jnp.float32, param_dtype=jnp.float32)
    >>> graphdef, params, statistics = nnx.split(layer, nnx.Param, nnx.BatchStat)
    >>> @jax.jit
    ... def train_step(params, statistics, x):
    ...     layer = nnx.merge(graphdef, params, statistics)
    ...     y = layer(x, train=True)
    ...     return y, nnx.state(layer, nnx.BatchStat)
    >>> y, statistics = train_step(params, statistics, jnp.arange(12.0).reshape(4, 3))
    >>> statistics["mean"][...]
    Array([2.25, 2.75, 3.25], dtype=float32)
    """

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.1,
        eps: float = 1e-5,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
    ):
        """Starts as the identity.

        Args:
          features: size of the last axis.
          momentum: weight of the new batch in the running statistics, as PyTorch counts it.
          eps: added to the variance.
          dtype: dtype of the result.
          param_dtype: dtype of scale and bias; the statistics are float32 at least.
        """
        statistics = jnp.promote_types(param_dtype, jnp.float32)
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype))
        self.mean = nnx.BatchStat(jnp.zeros((features,), statistics))
        self.var = nnx.BatchStat(jnp.ones((features,), statistics))
        self.momentum = momentum
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Array, *, train: bool = False) -> Array:
        """Normalises x [..., features]; in training updates the running statistics too.

        Raises:
          ValueError: in training, a feature has a single value, which has no variance.
        """
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # An empty batch has no statistics; what it gives is empty as well.
        mean, var = self._of_batch(x) if train and x.size else (self.mean[...], self.var[...])
        factor = jax.lax.rsqrt(var + self.eps) * self.scale[...].astype(var.dtype)
        y = (x - mean) * factor + self.bias[...].astype(var.dtype)
        return y.astype(self.dtype)

    def _of_batch(self, x: Array) -> tuple[Array, Array]:
        """The mean and variance of a batch, which also move the running ones."""
        axes = tuple(range(x.ndim - 1))
        count = x.size // x.shape[-1]
        if count == 1:
            raise ValueError(
                "batch norm in training needs more than one value per channel, got shape "
                f"{x.shape}: use a larger batch or larger images"
            )
        mean = jnp.mean(x, axis=axes)
        var = jnp.mean((x - mean) ** 2, axis=axes)
        # New variables, not new values in the old ones: those may belong to an outer trace, where
        # they must not change.
        self.mean = self._moved(self.mean, mean)
        self.var = self._moved(self.var, var * (count / (count - 1)))
        return mean, var

    def _moved(self, running: nnx.BatchStat, new: Array) -> nnx.BatchStat:
        old = running[...]
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        return nnx.BatchStat((1 - self.momentum) * old + self.momentum * new)
