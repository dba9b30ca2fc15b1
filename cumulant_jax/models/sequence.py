"""An encoder that classifies long sequences, with any attention in its blocks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from cumulant_jax.models import option_checks as checks
from cumulant_jax.models.blocks import build_block, layer_types
from cumulant_jax.models.call_checks import check_token_mask, split_key
from cumulant_jax.models.layers.block import Block, run_blocks
from cumulant_jax.models.layers.dropout import key_at, linear_rates
from cumulant_jax.models.layers.head import Head
from cumulant_jax.models.layers.initializers import class_token_init
from cumulant_jax.models.layers.norms import layer_norm
from cumulant_jax.models.layers.pair import INTERACTIONS, WIDTHS
from cumulant_jax.models.layers.sequence_positions import SEQUENCE_POSITIONS
from cumulant_jax.models.sequence_options import SequenceEncoderOptions

# As published: of the size of a sine-cosine position embedding, which would drown a smaller one.
_embedding_init = jax.nn.initializers.normal(stddev=1.0)


class SequenceEncoder(nnx.Module):
    """Transformer encoder in the layout of the Long Range Arena (arXiv 2011.04006).

    Token embedding, or a linear map of numbers -> class token -> positions -> pre-norm blocks ->
    norm -> pooling -> head. `SequenceEncoderOptions` says what each can be. Padding changes
    nothing: it is masked in every attention kind and left out of the mean.

    >>> options = SequenceEncoderOptions(vocab_size=20, max_tokens=32, dim=16, depth=1, heads=2,
    ...                                  attention="cumulant3", num_classes=10)
    >>> model = SequenceEncoder(options, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((3, 32), int), lengths=jnp.array([32, 5, 17])).shape
    (3, 10)
    """

    def __init__(self, options: SequenceEncoderOptions, *, rngs: nnx.Rngs):
        """Builds the model.

        Args:
          options: what it is made of.
          rngs: the keys of the initialisation.
        """
        if not isinstance(options, SequenceEncoderOptions):
            raise TypeError(
                f"options must be a SequenceEncoderOptions, got {type(options).__name__}"
            )
        checks.check_rngs(rngs)
        types = layer_types(options, rngs)
        self.options = options
        self.embedding = _Embedding(options, types)
        has_token = options.pool == "token"
        token = class_token_init(rngs.params(), (1, 1, options.dim), types["param_dtype"])
        self.class_token = nnx.Param(token) if has_token else None
        self.positions = SEQUENCE_POSITIONS[options.position](
            max_tokens=options.tokens,
            dim=options.dim,
            param_dtype=types["param_dtype"],
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(options.dropout)
        mlp = {"hidden_dim": int(options.dim * options.mlp_ratio), "gelu": options.gelu}
        self.blocks = nnx.List(
            [
                build_block(options, index, drop_path=rate, **mlp, **types)
                for index, rate in enumerate(linear_rates(options.drop_path, options.depth))
            ]
        )
        self.norm = layer_norm(options.dim, eps=options.eps, **types)
        self.head = _head(options, types) if options.num_classes else None

    def __call__(
        self,
        inputs: Array,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
        train: bool = False,
        rng: Array | None = None,
        return_intermediates: bool = False,
    ) -> Array | tuple[Array, dict[str, Array]]:
        """Classifies sequences.

        Args:
          inputs: integers [batch, tokens], at least 0 and below vocab_size, or with
            `input_features` floats [batch, tokens, input_features]. With `pairs` the batch is
            [batch, 2], here and in the other arguments.
          mask: bool [batch, tokens], False where there is padding.
          lengths: integers [batch] instead of a mask: what comes at and after the length is
            padding. What stands at padding does not matter, NaN included.
          train: whether dropout and drop path act.
          rng: a JAX random key; needed in training when a drop rate is above zero.
          return_intermediates: whether to return what is inside as well.

        Returns:
          Logits [batch, num_classes] in float32 at least, or with num_classes=0 the pooled features
          [batch, dim] (of pairs, what their `interaction` makes of them). With
          `return_intermediates` a pair of that and a dict: "embed" [batch, tokens, dim], the input
          of the first block; for each block i "block_i", its output, and "attention_i", what its
          attention layer returned before LayerScale and drop path; "pre_logits", what the head
          sees. Pairs count as two examples in all but the last.

        Raises:
          ValueError: inputs, a mask or lengths of a wrong shape, mask and lengths together, or no
            `rng` where one is needed.
          TypeError: an argument of the wrong kind.
        """
        checks.check_flag("train", train)
        checks.check_flag("return_intermediates", return_intermediates)
        options = self.options
        _check_inputs(inputs, options)
        mask = _check_mask(inputs, mask, lengths, options)
        count = 1 + options.depth * Block.num_keys
        keys = split_key(rng, count, train=train, rates=options.drop_rates)
        examples = inputs.shape[0] * (2 if options.pairs else 1)
        one = inputs.shape[2 if options.pairs else 1 :]
        inputs = jnp.asarray(inputs).reshape(examples, *one)
        if mask is not None:
            mask = jnp.asarray(mask).reshape(examples, one[0])
        x, mask = self._embed(inputs, mask)
        x = self.dropout(x, deterministic=not train, rngs=key_at(keys, 0))
        inside = {"embed": x}
        call: dict[str, Any] = {} if mask is None else {"mask": mask}
        x = run_blocks(
            self.blocks,
            x,
            train=train,
            keys=None if keys is None else keys[1:],
            remat=options.remat,
            inside=inside,
            **call,
        )
        features = self._pool(self.norm(x), mask)
        features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
        if options.pairs:
            first, second = features[0::2], features[1::2]
            features = INTERACTIONS[options.interaction](first, second)
        inside["pre_logits"] = features
        logits = features if self.head is None else self.head(features)
        return (logits, inside) if return_intermediates else logits

    def _embed(self, inputs: Array, mask: Array | None) -> tuple[Array, Array | None]:
        if mask is not None and self.options.input_features is not None:
            # Masked tokens reach no output, but a NaN in them would reach the gradients.
            inputs = jnp.where(mask[..., None], inputs, 0)
        x = self.embedding(inputs)
        if self.class_token is not None:
            token = self.class_token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
            if mask is not None:
                mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
        return self.positions(x), mask

    def _pool(self, x: Array, mask: Array | None) -> Array:
        if self.class_token is not None:
            return x[:, 0]
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        if mask is None:
            return x.mean(axis=1, dtype=dtype).astype(x.dtype)
        total = jnp.sum(x, axis=1, dtype=dtype, where=mask[..., None])
        return (total / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)).astype(x.dtype)


class _Embedding(nnx.Module):
    """Tokens through a table, or numbers through a linear map."""

    def __init__(self, options: SequenceEncoderOptions, types: dict[str, Any]):
        self.dtype = types["dtype"]
        features, tokens = options.input_features, options.vocab_size or 0
        self.linear = None if features is None else nnx.Linear(features, options.dim, **types)
        shape = (tokens, options.dim)
        table = _embedding_init(types["rngs"].params(), shape, types["param_dtype"])
        self.table = nnx.Param(table) if features is None else None

    @jax.named_scope("embedding")
    def __call__(self, inputs: Array) -> Array:
        if self.linear is not None:
            return self.linear(inputs)
        return self.table[...].astype(self.dtype)[inputs]  # pyright: ignore[reportOptionalSubscript]


class _MLPHead(nnx.Module):
    """Linear maps with ReLU between them, in float32 at least."""

    def __init__(self, sizes: list[int], types: dict[str, Any]):
        self.layers = nnx.List([Head(*pair, **types) for pair in itertools.pairwise(sizes)])

    def __call__(self, features: Array) -> Array:
        for layer in self.layers[:-1]:
            features = jax.nn.relu(layer(features))
        return self.layers[-1](features)


def _head(options: SequenceEncoderOptions, types: dict[str, Any]) -> nnx.Module:
    """The head: of pairs with one more layer, half as wide, as published."""
    width = options.dim * (WIDTHS[options.interaction] if options.pairs else 1)
    if options.head_dim is None:
        return Head(width, options.num_classes, **types)
    hidden = (
        [options.head_dim, max(options.head_dim // 2, 1)] if options.pairs else [options.head_dim]
    )
    return _MLPHead([width, *hidden, options.num_classes], types)


def _check_inputs(inputs: Any, options: SequenceEncoderOptions) -> None:
    if not isinstance(inputs, jax.Array | np.ndarray):
        raise TypeError(f"inputs must be an array, got {type(inputs).__name__}")
    pair = [2] if options.pairs else []
    last = [] if options.input_features is None else [options.input_features]
    place = 1 + len(pair)  # of the tokens
    shape = list(inputs.shape)
    right = len(shape) == place + 1 + len(last) and shape[1:place] == pair
    if not right or shape[place + 1 :] != last or not 0 < shape[place] <= options.max_tokens:
        layout = ", ".join(["batch", *map(str, pair), "tokens", *map(str, last)])
        raise ValueError(
            f"inputs must be [{layout}] with 1 to {options.max_tokens} tokens (max_tokens), got "
            f"shape {inputs.shape}"
        )
    kind, name = (jnp.integer, "integers") if not last else (jnp.floating, "floats")
    if not jnp.issubdtype(inputs.dtype, kind):
        raise TypeError(f"inputs must be {name}, got {inputs.dtype}")


def _check_mask(
    inputs: Any, mask: Any, lengths: Any, options: SequenceEncoderOptions
) -> Array | None:
    """The mask [*batch, tokens] that a mask or lengths amount to, or None."""
    shape = inputs.shape[: 3 if options.pairs else 2]
    if lengths is None:
        check_token_mask(mask, shape)
        return mask
    if mask is not None:
        raise ValueError("mask and lengths say the same thing: give one of them, the other None")
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if lengths.shape != shape[:-1]:
        raise ValueError(f"lengths must be [*batch] = {shape[:-1]}, got shape {lengths.shape}")
    return jnp.arange(shape[-1]) < lengths[..., None]
