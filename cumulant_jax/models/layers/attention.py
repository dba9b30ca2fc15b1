"""Attention layers: projections around an attention function, and the table from a kind's name to
its layer.

Every layer is built as Layer(dim=..., heads=..., ...) and called as layer(x, train=..., rng=...)
on tokens [batch, tokens, dim]. Heads are the slow part of the feature axis, as in timm and ToST.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.attention import (
    KINDS,
    attention,
    cross_covariance_attention,
    softmax_attention,
    token_statistics_attention,
)
from cumulant_jax.models.layers.initializers import bias_init, weight_init
from cumulant_jax.models.layers.norms import QK_NORMS

AttentionKind = str | Callable[..., Array]


class _ProjectedAttention(nnx.Module):
    """One linear layer in, an attention function, one linear layer out, dropout."""

    #: Input projections of `dim` features each: 3 for query, key and value, 1 where one serves for
    #: all.
    projections = 3

    #: The attention function of a layer that has but one.
    function: Callable[..., Array]

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        options: Mapping[str, Any] | None = None,
        qkv_bias: bool = True,
        projection_dropout: float = 0.0,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Builds the projections.

        Args:
          dim: features of a token, a multiple of `heads`.
          heads: number of heads.
          options: passed on to the attention function, such as {"reduction": "sum"}.
          qkv_bias: whether the input projection has a bias; the output projection always has one.
          projection_dropout: dropout rate after the output projection.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
        """
        linear = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": weight_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.qkv = nnx.Linear(dim, self.projections * dim, use_bias=qkv_bias, **linear)
        self.out = nnx.Linear(dim, dim, **linear)
        self.dropout = nnx.Dropout(projection_dropout)
        self.heads = heads
        # A tuple, as attributes of a module that are not arrays must be hashable.
        self.options = tuple(sorted((options or {}).items()))

    def attend(self, *projected: Array) -> Array:
        """Maps `projections` arrays [batch, tokens, heads, dim / heads] to one of that shape."""
        raise NotImplementedError

    @jax.named_scope("attention")
    def __call__(self, x: Array, *, train: bool = False, rng: Array | None = None) -> Array:
        """Lets the tokens of x [batch, tokens, dim] attend to each other; returns that shape.

        `rng` is needed in training with projection dropout.
        """
        split = jnp.split(self.qkv(x), self.projections, axis=-1)
        # No -1 in the shape: it cannot be told where there are no examples.
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        attended = self.attend(*(part.reshape(shape) for part in split))
        _check_attended(attended, shape)
        return self.dropout(self.out(attended.reshape(x.shape)), deterministic=not train, rngs=rng)


def _check_attended(attended: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless an attention function gave back what a layer can put together.

    A wrong layout has the right number of entries, so reshaping would scramble it silently.
    """
    is_array = isinstance(attended, Array | np.ndarray)
    if is_array and attended.shape == shape and jnp.issubdtype(attended.dtype, jnp.floating):
        return
    came = f"{attended.dtype} {attended.shape}" if is_array else type(attended).__name__
    raise ValueError(
        f"attention must return floats [batch, tokens, heads, dim / heads], here {shape} like its "
        f"query, key and value; the function returned {came}"
    )


class QKVAttention(_ProjectedAttention):
    """Projections to query, key and value around any attention function."""

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kind: AttentionKind = "softmax",
        qk_norm: str | None = None,
        query_scale: float | None = None,
        eps: float = 1e-6,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        **common: Any,
    ):
        """Builds the layer.

        Args:
          dim: features of a token.
          heads: number of heads.
          kind: a name in `cumulant_jax.attention.KINDS`, or a function called as function(query,
            key, value, **options).
          qk_norm: None, "layer" or "rms": normalises each head's queries and keys before they
            meet, with learned scales (and biases) shared by the heads.
          query_scale: where the learned factor per head on the queries starts; None leaves it out.
            It multiplies the attention function's own scale (dim / heads) ** -0.5.
          eps: epsilon of the normalisation of queries and keys.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          rngs: the keys of the initialisation.
          **common: `options`, `qkv_bias`, `projection_dropout`, as in every attention layer.
        """
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(dim=dim, heads=heads, **types, **common)
        self.kind = kind
        norm = QK_NORMS[qk_norm] if qk_norm is not None else None
        self.query_norm = norm(dim // heads, eps=eps, **types) if norm is not None else None
        self.key_norm = norm(dim // heads, eps=eps, **types) if norm is not None else None
        scales = None if query_scale is None else jnp.full((heads,), query_scale, param_dtype)
        self.query_scale = None if scales is None else nnx.Param(scales)

    def attend(self, *projected: Array) -> Array:
        """Normalises and scales query and key where asked, then calls the attention function."""
        query, key, value = projected
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_scale is not None:
            query = query * self.query_scale[...].astype(query.dtype)[:, None]
        options = dict(self.options)
        if isinstance(self.kind, str):
            return attention(self.kind, query, key, value, **options)
        return self.kind(query, key, value, **options)


class TSSAttention(_ProjectedAttention):
    """Token statistics self-attention of ToST (arXiv 2412.17810): one projection serves as query,
    key and value.

    The published layer can also drop entries of 1 / (1 + second moment) in training. That is left
    out here: every published configuration has it at 0, and projection dropout remains.
    """

    projections = 1
    function = staticmethod(token_statistics_attention)

    def __init__(self, *, heads: int, param_dtype: jnp.dtype, **common: Any):
        """Builds the projections and a learned `temperature` [heads] that starts at 1."""
        super().__init__(heads=heads, param_dtype=param_dtype, **common)
        self.temperature = nnx.Param(jnp.ones((heads,), param_dtype))

    def attend(self, *projected: Array) -> Array:
        """Applies the operator to w [batch, tokens, heads, dim / heads]."""
        return self.function(*projected, temperature=self.temperature[...], **dict(self.options))


class XCAttention(_ProjectedAttention):
    """Cross-covariance attention of XCiT (arXiv 2106.09681): the features of a head attend."""

    function = staticmethod(cross_covariance_attention)

    def __init__(self, *, heads: int, param_dtype: jnp.dtype, **common: Any):
        """Builds the projections and a learned `temperature` [heads] that starts at 1."""
        super().__init__(heads=heads, param_dtype=param_dtype, **common)
        self.temperature = nnx.Param(jnp.ones((heads,), param_dtype))

    def attend(self, *projected: Array) -> Array:
        """Applies the operator to query, key and value [batch, tokens, heads, dim / heads]."""
        return self.function(*projected, temperature=self.temperature[...], **dict(self.options))


class MSSAttention(_ProjectedAttention):
    """Multi-head subspace self-attention of CRATE (arXiv 2306.01129): softmax, with one projection
    for all three.

    CRATE has no bias in that projection: pass qkv_bias=False for its exact form.
    """

    projections = 1
    function = staticmethod(softmax_attention)

    def attend(self, *projected: Array) -> Array:
        """Applies softmax attention to w [batch, tokens, heads, dim / heads], three times w."""
        (w,) = projected
        return self.function(w, w, w, **dict(self.options))


#: Kinds that bring their own projections, to their layer. Every other kind is a `QKVAttention`.
OWN_PROJECTIONS: dict[str, type[_ProjectedAttention]] = {
    "tssa": TSSAttention,
    "xca": XCAttention,
    "mssa": MSSAttention,
}


def attention_kinds() -> list[str]:
    """The names that a model's `attention` option takes.

    >>> "cumulant3" in attention_kinds() and "tssa" in attention_kinds()
    True
    """
    return [*KINDS, *OWN_PROJECTIONS]


def layer_function(kind: AttentionKind) -> Callable[..., Array]:
    """The function that a kind's layer calls, which is the one that takes the layer's `options`."""
    if not isinstance(kind, str):
        return kind
    own = OWN_PROJECTIONS.get(kind)
    return KINDS[kind] if own is None else own.function


def attention_layer(
    kind: AttentionKind,
    *,
    qk_norm: str | None,
    query_scale: float | None,
    eps: float,
    **common: Any,
) -> nnx.Module:
    """Builds the layer of a kind.

    Args:
      kind: a name of `attention_kinds()` or an attention function.
      qk_norm: as in `QKVAttention`; without effect on kinds that bring their own projections.
      query_scale: likewise.
      eps: likewise.
      **common: the arguments of every attention layer.

    Returns:
      The layer, called as layer(x, train=..., rng=...).
    """
    own = OWN_PROJECTIONS.get(kind) if isinstance(kind, str) else None
    if own is not None:
        return own(**common)
    return QKVAttention(kind=kind, qk_norm=qk_norm, query_scale=query_scale, eps=eps, **common)
