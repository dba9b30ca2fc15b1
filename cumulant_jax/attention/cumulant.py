"""Cumulant attention: the truncated cumulant expansion of softmax attention, in linear time."""

from __future__ import annotations

from typing import Any

import jax

from cumulant_jax.attention import arguments
from cumulant_jax.attention.linear_time import check_state, prepare
from cumulant_jax.kernels import (
    CumulantReading,
    MomentState,
    PolynomialFeatures,
    causal_attention,
    moment_attention,
    state_shapes,
)

ORDERS = (1, 2, 3, 4)
REDUCTIONS = ("mean", "sum")


def cumulant_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | jax.Array | None = None,
    implementation: str | None = None,
    order: int = 3,
    offdiagonal: bool = False,
    reduction: str = "mean",
    initial_state: MomentState | None = None,
    return_state: bool = False,
) -> Any:
    r"""Attention from the first cumulants of keys and values.

    With centred keys κ = k − k̄ and values ν = v − v̄, and E the mean over the unmasked tokens,

      out = v̄ + E[(q·κ) ν] + ½ Σ_i q_i² E[κ_i² ν] + (1/6) Σ_i q_i³ (E[κ_i³ ν] − 3 E[κ_i²] E[κ_i ν])

    up to the term of the chosen order. There is no denominator and no [T, S] array: time and memory
    are linear in the number of tokens.

    Args:
      query: [*batch, T, H, D].
      key: [*batch, S, K, D]; H is a multiple of K.
      value: [*batch, S, K, Dv].
      mask: boolean, True = attend; [*batch, S], or anything that broadcasts to [*batch, H, T, S]
        and does not depend on the query. Masked keys and values may hold anything, NaN included.
      key_value_seq_lengths: int [*batch]; keys at and beyond the length are masked.
      is_causal: query t attends to keys up to t: means, centring and sums all run over those. In
        linear time too, chunk by chunk.
      scale: factor on the queries; None for D ** -0.5.
      implementation: None (the best for this device), "xla", "mosaic_gpu" or "mosaic_tpu".
      order: 1 (mean of the values), 2 (covariance), 3 (third cumulant), 4 (fourth, diagonal).
      offdiagonal: with order 3, the full third cumulant ½ Σ_ij q_i q_j E[κ_i κ_j ν]: the exact
        second-order Taylor polynomial of softmax attention, at D/2 times the cost.
      reduction: "mean", which approaches softmax attention for small queries, or "sum", the paper's
        literal form: the same times the number of unmasked tokens.
      initial_state: with is_causal, what an earlier call returned: its tokens come before these.
        The first call's options must be those of the later ones.
      return_state: with is_causal, whether to return the state after the last token as well. One
        token with its state is a decoding step, whatever the number of tokens before it.

    Returns:
      [*batch, T, H, Dv] in the dtype of `value`; zeros where every key is masked. With
      `return_state` a pair of that and a `MomentState`.

    Raises:
      ValueError: shapes or options do not fit, or the mask depends on the query.
      TypeError: an argument has the wrong type or dtype.
      NotImplementedError: what was asked for is not available in the implementation.

    Source:
      Morimoto, Wang, Yasuda, "Cumulant attention": attention as the gradient of a log-partition
      function (`attn_2nd`, `attn_3rd`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> cumulant_attention(q, k, v, order=3).shape
      (2, 100, 4, 16)
      >>> for t in (0.3, 0.03):  # the error of order 2 falls as the square of the query
      ...     exact = jax.nn.dot_product_attention(t * q, k, v)
      ...     error = cumulant_attention(t * q, k, v, order=2) - exact
      ...     print(f"{jnp.abs(error).max():.0e}")
      5e-02
      5e-04
    """
    check_cumulant_options(order, offdiagonal, reduction)
    query, key, value, mask, scale, dtype = prepare(
        "cumulant_attention",
        query,
        key,
        value,
        mask=mask,
        key_value_seq_lengths=key_value_seq_lengths,
        is_causal=is_causal,
        scale=scale,
        implementation=implementation,
        initial_state=initial_state,
        return_state=return_state,
    )
    features = PolynomialFeatures(order, all_pairs=offdiagonal)
    reading = CumulantReading(features, reduction_is_sum=reduction == "sum")
    options: Any = {
        "scale": scale,
        "operation": "cumulant_attention",
        "implementation": implementation,
    }
    if is_causal:
        check_state(initial_state, state_shapes(reading, key, value))
        out, state = causal_attention(reading, query, key, value, mask, initial_state, **options)
        return (out.astype(dtype), state) if return_state else out.astype(dtype)
    return moment_attention(reading, query, key, value, mask, **options).astype(dtype)


def check_cumulant_options(order: int, offdiagonal: bool, reduction: str) -> None:
    """Raises a ValueError that names the option which is out of range."""
    arguments.check_choice("order", order, ORDERS)
    arguments.check_choice("reduction", reduction, REDUCTIONS)
    arguments.check_flag("offdiagonal", offdiagonal)
    if offdiagonal and order != 3:
        raise ValueError(
            f"offdiagonal=True is the full third cumulant and needs order=3; got order={order}."
        )
