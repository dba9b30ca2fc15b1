"""Text generation: the loop that feeds a language model its own tokens."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.core import Tracer

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.call_checks import check_token_mask
from cumulant_jax.models.language import LanguageModel


def left_pad(
    prompts: Sequence[Sequence[int]], *, pad_token: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Brings prompts of different lengths into one array, padding on the left.

    Args:
      prompts: token sequences, none of them empty.
      pad_token: what stands at padding; any token will do.

    Returns:
      int32 [batch, longest], and a mask [batch, longest], True = a token of the prompt.

    Raises:
      ValueError: there is no prompt, or one of no tokens.

    >>> tokens, mask = left_pad([[5, 6, 7], [8]])
    >>> tokens
    array([[5, 6, 7], [0, 0, 8]], dtype=int32)
    >>> mask
    array([[ True,  True,  True], [False, False,  True]])
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    if not lengths.all() or not len(lengths):
        raise ValueError(f"prompts must be one or more, of a token at least; got lengths {lengths}")
    tokens = np.full((len(prompts), lengths.max()), pad_token, np.int32)
    mask = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    tokens[mask] = np.concatenate([np.asarray(prompt) for prompt in prompts])
    return tokens, mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a compiled generation loop depends on."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    eos: int | None


def generate(
    model: LanguageModel,
    prompts: Array,
    *,
    max_new_tokens: int,
    mask: Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    rng: Array | None = None,
) -> Array:
    """Continues prompts, token by token, in one compiled loop.

    A step costs the same whatever came before it for the linear-time kinds, whose state does not
    grow; softmax reads its key-value cache.

    Args:
      model: a language model.
      prompts: integers [batch, tokens].
      max_new_tokens: how many tokens to add; with the prompt's they are at most block_size.
      mask: bool [batch, tokens], False at padding, which stands on the left: see `left_pad`.
        Padding changes nothing.
      temperature: divides the logits; 0 takes the most likely token, always.
      top_k: sample among the k most likely tokens (and those as likely as the last of them).
      top_p: sample among the most likely tokens that together have this probability, after
        `top_k`; 0 < top_p <= 1.
      eos: the token that ends a sequence; from there on a row holds nothing but this token. The
        loop stops when all rows have ended.
      rng: a JAX random key; needed with a temperature above 0.

    Returns:
      int32 [batch, max_new_tokens], the new tokens alone.

    Raises:
      ValueError: an argument is out of range, or there is no `rng` where one is needed.
      TypeError: an argument is of the wrong kind.
      NotImplementedError: the model's attention has no state to carry.

    Source:
      top_p: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.

    Example:
      >>> from cumulant_jax import models
      >>> model = models.create("tost_lm_nano", vocab_size=50, block_size=32, rngs=nnx.Rngs(0))
      >>> prompts, mask = left_pad([[5, 6, 7], [8]])
      >>> generate(model, prompts, mask=mask, max_new_tokens=4).shape
      (2, 4)
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model must be a LanguageModel, got {type(model).__name__}")
    _check_sampling(temperature, top_k, top_p, model.options.vocab_size)
    checks.check_count("max_new_tokens", max_new_tokens, least=1)
    if eos is not None:
        checks.check_count("eos", eos, least=0)
    if rng is not None:
        checks.check_key("rng", rng)
    prompts = jnp.asarray(prompts)
    check_token_mask(mask, prompts.shape)
    if mask is not None and not isinstance(mask, Tracer) and not np.all(mask[:, -1]):
        raise ValueError("mask must be True in its last column: padding stands on the left")
    settings = _Settings(
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
        eos=eos,
    )
    graphdef, state = nnx.split(model)
    return _generate(graphdef, settings, state, prompts, mask, rng)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
    graphdef: nnx.GraphDef,
    settings: _Settings,
    state: nnx.State,
    prompts: Array,
    mask: Array | None,
    rng: Array | None,
) -> Array:
    model = nnx.merge(graphdef, state)
    batch, tokens = prompts.shape
    logits, decoding = model.extend(
        prompts, model.start(batch, tokens + settings.max_new_tokens), mask=mask
    )

    def is_open(carry):
        index, _, _, _, ended = carry
        return (index < settings.max_new_tokens) & ~ended.all()

    def step(carry):
        index, out, logits, decoding, ended = carry
        key = None if rng is None else jax.random.fold_in(rng, index)
        new = sample(
            logits,
            key,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        if settings.eos is not None:
            new = jnp.where(ended, settings.eos, new)
            ended = ended | (new == settings.eos)
        out = lax.dynamic_update_slice(out, new[:, None], (0, index))
        logits, decoding = model.extend(new[:, None], decoding)
        return index + 1, out, logits, decoding, ended

    filler = 0 if settings.eos is None else settings.eos
    out = jnp.full((batch, settings.max_new_tokens), filler, jnp.int32)
    carry = (jnp.int32(0), out, logits, decoding, jnp.zeros(batch, bool))
    return lax.while_loop(is_open, step, carry)[1]


def sample(
    logits: Array,
    rng: Array | None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Array:
    """Draws one token for each row of logits.

    Args:
      logits: [..., vocab_size].
      rng: a JAX random key; not looked at with temperature 0.
      temperature: as in `generate`, and so are the others.
      top_k: see `generate`.
      top_p: see `generate`.

    Returns:
      int32 [...].

    >>> logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    >>> draws = sample(jnp.tile(logits, (1000, 1)), jax.random.key(0), top_p=0.75)
    >>> sorted(set(draws.tolist()))
    [0, 1]
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        least = lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None:
        logits = _keep_nucleus(logits, top_p)
    if rng is None:
        raise ValueError("rng must be a key with a temperature above 0: pass jax.random.key(seed)")
    return jax.random.categorical(rng, logits).astype(jnp.int32)


def _keep_nucleus(logits: Array, top_p: float) -> Array:
    order = jnp.argsort(-logits, axis=-1)
    probability = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
    # A token stays while those before it have not reached top_p; the first one always does.
    stays = jnp.cumsum(probability, axis=-1) - probability < top_p
    stays = jnp.take_along_axis(stays, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(stays, logits, -jnp.inf)


def _check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, vocab_size: int
) -> None:
    checks.check_number("temperature", temperature)
    if top_k is not None:
        checks.check_count("top_k", top_k, least=1)
        if top_k > vocab_size:
            raise ValueError(f"top_k must be at most vocab_size = {vocab_size}, got {top_k}")
    if top_p is not None:
        checks.check_number("top_p", top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
