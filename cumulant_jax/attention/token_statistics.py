"""Token statistics self-attention (ToST): attention from second moments of projected tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cumulant_jax.attention import arguments
from cumulant_jax.attention.linear_time import check_state, check_state_options
from cumulant_jax.attention.masks import token_mask
from cumulant_jax.kernels import TokenStatisticsState, check_implementation
from cumulant_jax.kernels.token_statistics import (
    attend,
    causal_attend,
    empty_statistics,
    token_statistics,
)


def token_statistics_attention(
    w: jax.Array,
    *,
    temperature: jax.Array | float,
    mask: jax.Array | None = None,
    seq_lengths: jax.Array | None = None,
    is_causal: bool = False,
    denominator_bias: jax.Array | None = None,
    initial_state: TokenStatisticsState | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> Any:
    """Self-attention from one projection of the tokens and its second moments.

    With s = w², memberships Π and second moments m,

      Π[n, h] = softmax over heads of temperature_h · Σ_i s[n, h, i] / Σ_m s[m, h, i]
      m[h, i] = Σ_n Π[n, h] s[n, h, i] / (Σ_n Π[n, h] + 1e-8)
      out     = − w · Π / (1 + m)

    Time is linear in the tokens. In the causal form sums run over the tokens up to each one, and
    the logits are temperature_h · Σ_i (s / running Σ s + denominator_bias[h, t]).

    Args:
      w: projected tokens [*batch, T, H, D].
      temperature: [H] or a scalar, learned.
      mask: boolean [*batch, T], True = the token takes part. Masked tokens may hold anything, NaN
        included; their outputs are zero.
      seq_lengths: int [*batch]; tokens at and beyond the length are masked.
      is_causal: token t sees the tokens up to t.
      denominator_bias: [H, T] or [*batch, H, T], learned, with is_causal; for these tokens'
        positions, which differ from row to row where padding stands on the left.
      initial_state: with is_causal, what an earlier call returned: its tokens come before these.
      return_state: with is_causal, whether to return the state after the last token as well.
      implementation: None (the best for this device), "xla", "mosaic_gpu" or "mosaic_tpu".

    Returns:
      [*batch, T, H, D] in the dtype of `w`. An all-zero input gives zeros and finite gradients.
      With `return_state` a pair of that and a `TokenStatisticsState`.

    Raises:
      ValueError: shapes do not fit.
      TypeError: an argument has the wrong type or dtype.
      NotImplementedError: what was asked for is not available in the implementation.

    Source:
      Wu et al., "Token Statistics Transformer", arXiv 2412.17810, section 3 (TSSA), with the token
      normalisation of the published code.

    Example:
      >>> import jax
      >>> w = jax.random.normal(jax.random.key(0), (2, 100, 4, 16))
      >>> token_statistics_attention(w, temperature=1.0).shape
      (2, 100, 4, 16)
    """
    arguments.check_flag("is_causal", is_causal)
    w = arguments.check_array("w", w)
    temperature = arguments.check_per_head("temperature", temperature, w.shape[-2])
    check_implementation(implementation)
    check_state_options(initial_state, return_state=return_state, is_causal=is_causal)
    bias = _check_bias(denominator_bias, w, is_causal)
    mask = token_mask(mask, seq_lengths, w.shape[:-3], w.shape[-3])
    if not is_causal:
        return attend(w, temperature, mask, implementation=implementation)
    empty = empty_statistics(w)
    check_state(initial_state, empty)
    state = empty if initial_state is None else initial_state
    out, state = causal_attend(w, temperature, mask, bias, state, implementation=implementation)
    return (out, state) if return_state else out


def token_memberships(
    w: jax.Array,
    *,
    temperature: jax.Array | float,
    mask: jax.Array | None = None,
    seq_lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The memberships Π and second moments m of `token_statistics_attention`, for looking at.

    Args:
      w: projected tokens [*batch, T, H, D].
      temperature: [H] or a scalar.
      mask: boolean [*batch, T], True = the token takes part.
      seq_lengths: int [*batch]; tokens at and beyond the length are masked.

    Returns:
      Π [*batch, T, H], which sums to 1 over the heads (0 for a masked token), and m [*batch, H, D];
      float32, or float64 for a float64 `w`.

    Example:
      >>> import jax
      >>> w = jax.random.normal(jax.random.key(0), (2, 100, 4, 16))
      >>> membership, second_moment = token_memberships(w, temperature=1.0)
      >>> membership.shape, second_moment.shape
      ((2, 100, 4), (2, 4, 16))
    """
    w = arguments.check_array("w", w)
    temperature = arguments.check_per_head("temperature", temperature, w.shape[-2])
    mask = token_mask(mask, seq_lengths, w.shape[:-3], w.shape[-3])
    return token_statistics(w, temperature, mask)


def _check_bias(bias: Any, w: jax.Array, is_causal: bool) -> jax.Array | None:
    if bias is None:
        return None
    if not is_causal:
        raise ValueError("denominator_bias belongs to is_causal=True; leave it None otherwise.")
    bias = jnp.asarray(bias)
    tokens, heads, _ = w.shape[-3:]
    shape = (*w.shape[:-3], heads, tokens)
    if bias.shape not in (shape, shape[-2:]):
        raise ValueError(
            f"denominator_bias must be [heads, tokens] = {shape[-2:]} or [*batch, heads, tokens] = "
            f"{shape}; got shape {bias.shape}."
        )
    return bias
