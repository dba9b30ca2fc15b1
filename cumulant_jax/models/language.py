"""The causal language model, with any causal attention in its blocks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_attention, build_block, layer_types
from cumulant_jax.models.call_checks import check_token_mask, split_key
from cumulant_jax.models.language_options import LanguageModelOptions
from cumulant_jax.models.layers.block import Block, run_blocks
from cumulant_jax.models.layers.dropout import key_at, linear_rates
from cumulant_jax.models.layers.initializers import embedding_init
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.sequence_positions import SEQUENCE_POSITIONS


class DecodingState(NamedTuple):
    """What a language model carries from token to token.

    Attributes:
      layers: the state of each block's attention layer. Its size does not depend on the number of
        tokens for the linear-time kinds; for softmax it is a key-value cache.
      length: int32 [batch], the tokens so far, without padding.
    """

    layers: tuple[Any, ...]
    length: Array


class LanguageModel(nnx.Module):
    """Causal transformer in the layout of GPT-2, as ToST builds it (arXiv 2412.17810).

    Token embedding -> positions -> pre-norm blocks with LayerScale -> norm -> logits through the
    same embedding. With `attention="tssa"` this is the causal ToST model, its layers with a learned
    `denominator_bias` for each position; with "softmax" the baseline it is compared with. Weights
    are normal with deviation 0.02 (those of linear layers are cut at two), smaller by
    sqrt(2 * depth) where a branch ends.

    >>> options = LanguageModelOptions(vocab_size=11, block_size=8, dim=16, depth=2, heads=2,
    ...                                attention="tssa")
    >>> model = LanguageModel(options, rngs=nnx.Rngs(0))
    >>> model(jnp.array([[1, 2, 3], [4, 5, 6]])).shape
    (2, 3, 11)
    """

    def __init__(self, options: LanguageModelOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, LanguageModelOptions):
            raise TypeError(f"options must be a LanguageModelOptions, got {type(options).__name__}")
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        param_dtype = types["param_dtype"]
        self.options = options
        shape = (options.vocab_size, options.dim)
        self.token_embedding = nnx.Param(embedding_init(rngs.params(), shape, param_dtype))
        self.positions = SEQUENCE_POSITIONS[options.position](
            max_tokens=options.block_size, dim=options.dim, param_dtype=param_dtype, rngs=rngs
        )
        self.dropout = nnx.Dropout(options.dropout)
        rates = linear_rates(options.drop_path, options.depth)
        self.blocks = nnx.List(
            [_block(options, index, rate, types) for index, rate in enumerate(rates)]
        )
        self.norm = layer_norm(options.dim, eps=options.eps, bias=options.bias, **types)

    def __call__(
        self,
        tokens: Array,
        *,
        mask: Array | None = None,
        train: bool = False,
        rng: Array | None = None,
        return_intermediates: bool = False,
    ) -> Array | tuple[Array, dict[str, Array]]:
        """Predicts the token after each token.

        Args:
          tokens: integers [batch, tokens], at least 0 and below vocab_size.
          mask: bool [batch, tokens], False where there is padding, on either side. Positions count
            the tokens that are there, so that padding changes nothing for the others; what comes
            out at padding means nothing.
          train: whether dropout and drop path act.
          rng: a JAX random key; needed in training when a drop rate is above zero.
          return_intermediates: whether to return what is inside as well.

        Returns:
          Logits [batch, tokens, vocab_size] in float32 at least. With `return_intermediates` a pair
          of that and a dict: "embed" [batch, tokens, dim], the input of the first block; for each
          block i "block_i", its output, and "attention_i", what its attention layer returned before
          LayerScale and drop path; "pre_logits", what the last linear map sees.

        Raises:
          ValueError: tokens or a mask of a wrong shape, more tokens than block_size, or no `rng`
            where one is needed.
          TypeError: tokens that are not integers, a mask that is not boolean, an `rng` that is not
            one key, or a `train` or `return_intermediates` that is not a bool.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        self._check_tokens(tokens)
        check_token_mask(mask, tokens.shape)
        count = 1 + self.options.depth * Block.num_keys
        keys = split_key(rng, count, train=train, rates=self.options.drop_rates)
        call: dict[str, Any] = {"is_causal": True}
        if mask is not None:
            call |= {"mask": mask, "positions": _positions(mask, 0)}
        x = self._embed(tokens, call.get("positions"))
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside = {"embed": x}
        x = run_blocks(
            self.blocks,
            x,
            train=train,
            keys=None if keys is None else keys[1:],
            remat=self.options.remat,
            inside=inside,
            **call,
        )
        inside["pre_logits"] = self.norm(x)
        logits = self._logits(inside["pre_logits"])
        return (logits, inside) if return_intermediates else logits

    def start(self, batch: int, capacity: int) -> DecodingState:
        """The state before the first token.

        Args:
          batch: number of sequences.
          capacity: the most tokens, padding included, that will come; it decides the size of the
            key-value caches, and nothing for the linear-time kinds.

        Raises:
          ValueError: the capacity is above block_size.
          NotImplementedError: an attention function has no state to carry.
        """
        checks.check_count("capacity", capacity, least=1)
        if capacity > self.options.block_size:
            raise ValueError(
                f"capacity must be at most block_size = {self.options.block_size}, got {capacity}"
            )
        layers = tuple(block.attention.start(batch, capacity) for block in self.blocks)
        return DecodingState(layers, jnp.zeros(batch, jnp.int32))

    def extend(
        self, tokens: Array, state: DecodingState, *, mask: Array | None = None
    ) -> tuple[Array, DecodingState]:
        """Goes on with sequences: a prompt, a part of one, or one token each.

        Args:
          tokens: integers [batch, tokens]; the capacity that `start` was given bounds all of them
            together, which is not checked here.
          state: what `start` or an earlier call returned.
          mask: bool [batch, tokens], False where there is padding.

        Returns:
          Logits [batch, vocab_size] for the token after the last one (so padding belongs on the
          left), in float32 at least, and the state after it.
        """
        self._check_tokens(tokens)
        check_token_mask(mask, tokens.shape)
        present = jnp.ones(tokens.shape, bool) if mask is None else mask
        positions = _positions(present, state.length[:, None])
        x = self._embed(tokens, positions)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.extend(x, layer, positions=positions, mask=mask)
            layers.append(layer)
        logits = self._logits(self.norm(x[:, -1]))
        length = state.length + present.sum(axis=1, dtype=jnp.int32)
        return logits, DecodingState(tuple(layers), length)

    def _embed(self, tokens: Array, positions: Array | None) -> Array:
        x = self.token_embedding[...].astype(self.options.dtype)[tokens]
        return self.positions(x, positions)

    def _logits(self, x: Array) -> Array:
        # The products are in the dtype of the computation, their sums in float32 at least: this
        # map is up to a third of the work.
        table = self.token_embedding[...].astype(x.dtype)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=dtype)

    def _check_tokens(self, tokens: Array) -> None:
        if not isinstance(tokens, jax.Array | np.ndarray):
            raise TypeError(f"tokens must be an array, got {type(tokens).__name__}")
        longest = self.options.block_size
        if tokens.ndim != 2 or not 0 < tokens.shape[1] <= longest:
            raise ValueError(
                f"tokens must be [batch, tokens] with 1 to {longest} tokens (block_size), got "
                f"shape {tokens.shape}"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")


def _block(options: LanguageModelOptions, index: int, drop_path: float, types: dict) -> Block:
    layer = build_attention(
        options, index, out_bias=options.bias, max_tokens=options.block_size, **types
    )
    block = build_block(
        options,
        index,
        attention=layer,
        hidden_dim=int(options.dim * options.mlp_ratio),
        drop_path=drop_path,
        bias=options.bias,
        **types,
    )
    for kernel in (layer.out.kernel, block.mlp.contract.kernel):
        kernel[...] = kernel[...] * (2 * options.depth) ** -0.5
    return block


def _positions(mask: Array, before: Array | int) -> Array:
    """Where each token stands in its row [batch, tokens], counting what is there alone."""
    return jnp.maximum(before + jnp.cumsum(jnp.asarray(mask), axis=1, dtype=jnp.int32) - 1, 0)
