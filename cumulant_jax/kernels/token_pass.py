"""One pass over the tokens: the single loop under every linear-time attention here.

A pass calls `body` on slices of the token axis. What `body` returns per token is put together again
along that axis; what it returns as sums is added up. Summing moments is a pass without per-token
output; reading them out with the queries is a pass without sums; and the backward pass of either is
a pass again, because the cotangent of a token input is per token and the cotangent of a shared
input is a sum over tokens. So one custom derivative rule serves all, and memory stays linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cumulant_jax.kernels.block_sizes import tuned
from cumulant_jax.kernels.device import current_device

PyTree = Any
Body = Callable[[PyTree, "jax.Array | None", PyTree], tuple[PyTree, PyTree]]

# On the CPU a chunk is sized so that its working set stays in the cache. An accelerator is better
# served by few large matrix products, so there the chunk only bounds the memory.
_CHUNK_BYTES = {"cpu": 3 << 19}
_CHUNK_BYTES_ACCELERATOR = 1 << 28
_SHORTEST, _LONGEST = 128, 1024

#: What `experiments.benchmark --tune` tries.
CANDIDATES = {"chunk_bytes": (1 << 18, 1 << 19, 1 << 20, 3 << 19, 1 << 21, 1 << 22, 1 << 23)}


def chunk_length(num_tokens: int, bytes_per_token: int, *, platform: str | None = None) -> int:
    """Chooses the number of tokens per chunk.

    Args:
      num_tokens: length of the token axis.
      bytes_per_token: size of the largest intermediate array per token, over all batches and heads.
      platform: "cpu", "gpu" or "tpu"; None for the device at hand, and what was tuned for it.

    Returns:
      A length that splits the tokens almost evenly, or `num_tokens` where one chunk will do (or
      where their number is symbolic, in an exported program).

    >>> chunk_length(4096, 6 * 129 * 4, platform="cpu")
    456
    >>> chunk_length(197, 6 * 129 * 4, platform="cpu")
    197
    """
    if not isinstance(num_tokens, int):
        return num_tokens
    device = current_device()
    sizes = tuned("xla", device.kind) if platform is None else {}
    platform = platform or device.platform
    chunk_bytes = sizes.get("chunk_bytes", _CHUNK_BYTES.get(platform, _CHUNK_BYTES_ACCELERATOR))
    most = max(chunk_bytes // bytes_per_token, _SHORTEST if platform == "cpu" else _LONGEST)
    if platform == "cpu":
        most = min(most, _LONGEST)
    if 2 * num_tokens <= 3 * most:
        return max(num_tokens, 1)
    return -(-num_tokens // -(-num_tokens // most))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_pass(
    body: Body, chunk: int, tokens: PyTree, mask: jax.Array | None, shared: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs `body` over chunks of the token axis.

    Args:
      body: `body(tokens, mask, shared) -> (per_token, sums)`, called with slices of at most `chunk`
        tokens. It treats tokens independently of each other, and `sums` are additive over them.
      chunk: tokens per call (static).
      tokens: pytree of arrays [..., tokens, heads, dim].
      mask: None or bool [..., tokens, heads or 1].
      shared: pytree of arrays that every chunk sees whole.

    Returns:
      `per_token`, with arrays [..., tokens, heads, any], and `sums`.
    """
    length = jax.tree.leaves(tokens)[0].shape[-3]
    if length <= chunk:
        return body(tokens, mask, shared)

    def run(start, size):
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, x.ndim - 3), tokens)
        part_mask = mask
        if mask is not None:
            part_mask = lax.dynamic_slice_in_dim(mask, start, size, mask.ndim - 2)
        return body(part, part_mask, shared)

    # The first chunk takes what is left over, and its results, padded, are what the loop starts
    # from: so they have the loop's types, shardings and mesh axes without these being spelled out.
    full = (length - 1) // chunk
    first = length - full * chunk
    per_token, sums = run(0, first)
    per_token = jax.tree.map(functools.partial(_pad_tokens, length=length), per_token)

    def step(index, carry):
        per_token, sums = carry
        start = first + index * chunk
        part, part_sums = run(start, chunk)
        return _write(per_token, part, start), jax.tree.map(jnp.add, sums, part_sums)

    return lax.fori_loop(0, full, step, (per_token, sums))


def _pad_tokens(x: jax.Array, *, length: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[-3] = (0, length - x.shape[-3])
    return jnp.pad(x, padding)


def _write(whole: PyTree, part: PyTree, start) -> PyTree:
    return jax.tree.map(
        lambda w, p: lax.dynamic_update_slice_in_dim(w, p, start, w.ndim - 3), whole, part
    )


def _pull_back(body: Body, inputs: PyTree, mask, shared: PyTree) -> tuple[PyTree, PyTree]:
    """The body of the backward pass: token cotangents per token, shared cotangents as sums."""
    tokens, per_token_bar = inputs
    shared, sums_bar = shared
    _, pull = jax.vjp(lambda tokens, shared: body(tokens, mask, shared), tokens, shared)
    return pull((per_token_bar, sums_bar))


def pull_back_pass(
    body: Body,
    chunk: int,
    tokens: PyTree,
    mask: jax.Array | None,
    shared: PyTree,
    per_token_bar: PyTree,
    sums_bar: PyTree,
) -> tuple[PyTree, PyTree]:
    """The pass that takes the cotangents of what `token_pass` returned to those of its inputs.

    Returns:
      The cotangents of `tokens` and of `shared`.
    """
    return token_pass(
        functools.partial(_pull_back, body),
        chunk,
        (tokens, per_token_bar),
        mask,
        (shared, sums_bar),
    )


def _forward(body, chunk, tokens, mask, shared):
    return token_pass(body, chunk, tokens, mask, shared), (tokens, mask, shared)


def _backward(body, chunk, residuals, cotangents):
    tokens_bar, shared_bar = pull_back_pass(body, chunk, *residuals, *cotangents)
    return tokens_bar, None, shared_bar


token_pass.defvjp(_forward, _backward)
