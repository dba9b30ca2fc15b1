"""Attention layers: projections around an attention function, and the table from a kind's name to
its layer.

Every layer is built as Layer(dim=..., heads=..., ...) and called as layer(x, train=..., rng=...)
on tokens [batch, tokens, dim]. Heads are the slow part of the feature axis, as in timm and ToST.
A causal layer also goes on where an earlier call stopped: see `start` and `extend`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array

from cumulant_jax.attention import (
    KINDS,
    cross_covariance_attention,
    softmax_attention,
    token_statistics_attention,
)
from cumulant_jax.models.layers.initializers import bias_init, weight_init
from cumulant_jax.models.layers.key_value_cache import (
    KeyValueCache,
    cached_attention,
    empty_cache,
)
from cumulant_jax.models.layers.norms import QK_NORMS
from cumulant_jax.models.layout import constrain, splits

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
        out_bias: bool = True,
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
          qkv_bias: whether the input projection has a bias.
          out_bias: whether the output projection has one.
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
        self.out = nnx.Linear(dim, dim, use_bias=out_bias, **linear)
        self.dropout = nnx.Dropout(projection_dropout)
        self.heads = heads
        # A tuple, as attributes of a module that are not arrays must be hashable.
        self.options = tuple(sorted((options or {}).items()))

    def attend(self, *projected: Array, positions: Array | None, **options: Any) -> Any:
        """Maps `projections` arrays [batch, tokens, heads, dim / heads] to one of that shape.

        With `return_state` among the options, to a pair of that and the state.
        """
        raise NotImplementedError

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Array,
        *,
        train: bool = False,
        rng: Array | None = None,
        positions: Array | None = None,
        **call: Any,
    ) -> Array:
        """Lets the tokens of x [batch, tokens, dim] attend to each other; returns that shape.

        Args:
          x: tokens [batch, tokens, dim].
          train: whether dropout acts.
          rng: a key, needed in training with projection dropout.
          positions: int [batch, tokens], where each token stands in its sequence; None: 0, 1, ....
            Only a layer that learns something for each position looks at them.
          **call: options of the attention function for this call, such as `mask` [batch, tokens]
            or `is_causal`.
        """
        options = {**dict(self.options), **call}
        attended = self.attend(*self._project(x), positions=positions, **options)
        return self._merge(attended, x, train=train, rng=rng)

    def start(self, batch: int, capacity: int) -> KeyValueCache | None:
        """The state before the first token of `batch` sequences of up to `capacity` tokens.

        It is None for the linear-time kinds: theirs is made by the first call of `extend`, and its
        size does not depend on the capacity.

        Raises:
          NotImplementedError: the attention function has no state to carry.
        """
        if self.caches:
            heads, dim = self.heads, self.out.in_features // self.heads
            dtype = jnp.dtype(self.qkv.dtype or self.qkv.param_dtype)
            return empty_cache(batch, capacity, heads, dim, dtype)
        if not _carries_state(self.function):
            name = getattr(self.function, "__name__", repr(self.function))
            raise NotImplementedError(
                f"attention {name} cannot go on token by token: it takes no initial_state and "
                "return_state; use a kind of cumulant_jax.models.attention_kinds() to generate"
            )
        return None

    def extend(
        self, x: Array, state: Any, *, positions: Array | None = None, **call: Any
    ) -> tuple[Array, Any]:
        """Causal attention of tokens that come after those of a state.

        Args:
          x: tokens [batch, tokens, dim].
          state: what `start` or an earlier call returned.
          positions: as in a call.
          **call: options of the attention function, such as `mask` [batch, tokens].

        Returns:
          [batch, tokens, dim], and the state after the last token.
        """
        options = {**dict(self.options), **call, "is_causal": True}
        attended, state = self.attend(
            *self._project(x),
            positions=positions,
            initial_state=state,
            return_state=True,
            **options,
        )
        return self._merge(attended, x, train=False, rng=None), state

    @property
    def caches(self) -> bool:
        """Whether the state is a cache of keys and values."""
        return self.function is softmax_attention

    def _project(self, x: Array) -> list[Array]:
        if splits("heads", self.heads) > 1:
            return self._project_by_heads(x)
        # No -1 in the shape: it cannot be told where there are no examples.
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        split = jnp.split(self.qkv(x), self.projections, axis=-1)
        return [part.reshape(shape) for part in split]

    def _project_by_heads(self, x: Array) -> list[Array]:
        """The same where each device has some of the heads, and computes the columns of those.

        Query, key and value lie behind each other in the kernel: split as it is, a device would
        have columns of heads that are not its own.
        """
        shape = (self.projections, self.heads, x.shape[-1] // self.heads)
        x, kernel, bias = promote_dtype(
            (x, self.qkv.kernel[...], None if self.qkv.bias is None else self.qkv.bias[...]),
            dtype=self.qkv.dtype,
        )
        kernel = constrain(kernel.reshape(-1, *shape), None, None, "heads", None)
        parts = jnp.einsum("btc,cphd->pbthd", x, kernel, precision=self.qkv.precision)
        if bias is not None:
            bias = constrain(bias.reshape(shape), None, "heads", None)
            parts = parts + bias[:, None, None]
        return [constrain(part, "batch", "tokens", "heads", None) for part in parts]

    def _merge(self, attended: Any, x: Array, *, train: bool, rng: Array | None) -> Array:
        _check_attended(attended, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads))
        return self.dropout(self.out(attended.reshape(x.shape)), deterministic=not train, rngs=rng)


def _call(
    function: Callable[..., Any], *projected: Array, initial_state: Any = None, **options: Any
) -> Any:
    """Calls an attention function, or its form with a cache where the state is one."""
    if isinstance(initial_state, KeyValueCache):
        return cached_attention(*projected, initial_state=initial_state, **options)
    if initial_state is not None or "return_state" in options:
        options["initial_state"] = initial_state
    return function(*projected, **options)


def _carries_state(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins do not tell
        return False
    return {"initial_state", "return_state"} <= set(parameters)


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
        self.function = layer_function(kind)
        norm = QK_NORMS[qk_norm] if qk_norm is not None else None
        self.query_norm = norm(dim // heads, eps=eps, **types) if norm is not None else None
        self.key_norm = norm(dim // heads, eps=eps, **types) if norm is not None else None
        scales = None if query_scale is None else jnp.full((heads,), query_scale, param_dtype)
        self.query_scale = None if scales is None else nnx.Param(scales)

    def attend(self, *projected: Array, positions: Array | None, **options: Any) -> Any:
        """Normalises and scales query and key where asked, then calls the attention function."""
        query, key, value = projected
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_scale is not None:
            query = query * self.query_scale[...].astype(query.dtype)[:, None]
        return _call(self.function, query, key, value, **options)


class TSSAttention(_ProjectedAttention):
    """Token statistics self-attention of ToST (arXiv 2412.17810): one projection serves as query,
    key and value.

    The published layer can also drop entries of 1 / (1 + second moment) in training. That is left
    out here: every published configuration has it at 0, and projection dropout remains.
    """

    projections = 1
    function = staticmethod(token_statistics_attention)

    def __init__(
        self, *, heads: int, param_dtype: jnp.dtype, max_tokens: int | None = None, **common: Any
    ):
        """Builds the projections and a learned `temperature` [heads] that starts at 1.

        Args:
          heads: number of heads.
          param_dtype: dtype of the parameters.
          max_tokens: for a causal layer, its longest sequence: it then learns `denominator_bias`
            [heads, max_tokens], a number for each position that starts at 0.
          **common: as in every attention layer.
        """
        super().__init__(heads=heads, param_dtype=param_dtype, **common)
        self.temperature = nnx.Param(jnp.ones((heads,), param_dtype))
        table = None if max_tokens is None else jnp.zeros((heads, max_tokens), param_dtype)
        self.denominator_bias = None if table is None else nnx.Param(table)

    def attend(self, *projected: Array, positions: Array | None, **options: Any) -> Any:
        """Applies the operator to w [batch, tokens, heads, dim / heads]."""
        (w,) = projected
        if self.denominator_bias is not None:
            options["denominator_bias"] = self._bias_at(positions, w.shape[1])
        return _call(self.function, w, temperature=self.temperature[...], **options)

    def _bias_at(self, positions: Array | None, tokens: int) -> Array:
        """The bias of tokens at positions [batch, tokens], as the operator takes it."""
        table = self.denominator_bias[...]  # pyright: ignore[reportOptionalSubscript]
        return table[:, :tokens] if positions is None else jnp.swapaxes(table.T[positions], -1, -2)


class XCAttention(_ProjectedAttention):
    """Cross-covariance attention of XCiT (arXiv 2106.09681): the features of a head attend."""

    function = staticmethod(cross_covariance_attention)

    def __init__(self, *, heads: int, param_dtype: jnp.dtype, **common: Any):
        """Builds the projections and a learned `temperature` [heads] that starts at 1."""
        super().__init__(heads=heads, param_dtype=param_dtype, **common)
        self.temperature = nnx.Param(jnp.ones((heads,), param_dtype))

    def attend(self, *projected: Array, positions: Array | None, **options: Any) -> Any:
        """Applies the operator to query, key and value [batch, tokens, heads, dim / heads]."""
        return _call(self.function, *projected, temperature=self.temperature[...], **options)


class MSSAttention(_ProjectedAttention):
    """Multi-head subspace self-attention of CRATE (arXiv 2306.01129): softmax, with one projection
    for all three.

    CRATE has no bias in that projection: pass qkv_bias=False for its exact form.
    """

    projections = 1
    function = staticmethod(softmax_attention)

    def attend(self, *projected: Array, positions: Array | None, **options: Any) -> Any:
        """Applies softmax attention to w [batch, tokens, heads, dim / heads], three times w."""
        (w,) = projected
        return _call(self.function, w, w, w, **options)


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
    max_tokens: int | None = None,
    **common: Any,
) -> _ProjectedAttention:
    """Builds the layer of a kind.

    Args:
      kind: a name of `attention_kinds()` or an attention function.
      qk_norm: as in `QKVAttention`; without effect on kinds that bring their own projections.
      query_scale: likewise.
      eps: likewise.
      max_tokens: the longest sequence of a causal layer, as in `TSSAttention`; without effect on
        other kinds.
      **common: the arguments of every attention layer.

    Returns:
      The layer, called as layer(x, train=..., rng=...).
    """
    own = OWN_PROJECTIONS.get(kind) if isinstance(kind, str) else None
    if own is TSSAttention:
        return TSSAttention(max_tokens=max_tokens, **common)
    if own is not None:
        return own(**common)
    return QKVAttention(kind=kind, qk_norm=qk_norm, query_scale=query_scale, eps=eps, **common)
