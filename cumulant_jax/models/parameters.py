"""Facts about a model's parameters: how many there are, and which take weight decay."""

import math
from typing import Any

import jax
from flax import nnx


def count_parameters(model: nnx.Module) -> int:
    """The number of parameters of a model, which may be an abstract one.

    Args:
      model: an NNX module, or what `nnx.eval_shape` gives for one, which costs no memory.

    Returns:
      The number of scalars in its `nnx.Param` variables.

    >>> from cumulant_jax import models
    >>> count_parameters(nnx.eval_shape(lambda: models.create("vit_b16", rngs=nnx.Rngs(0))))
    86567656
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def decays(path: tuple[Any, ...]) -> bool:
    """Whether weight decay applies to the parameter at a path: to kernels, and to nothing else.

    Biases, norms, LayerScale, temperatures, query scales, position embeddings and the class token
    do not decay.

    Args:
      path: names from the root to the parameter, as in `nnx.to_flat_state`, or a key path of
        `jax.tree_util`.

    Returns:
      True for the weights of linear maps and convolutions, which all models call `kernel`.

    >>> decays(("blocks", 0, "mlp", "expand", "kernel")), decays(("class_token",))
    (True, False)
    """
    names = [_entry_name(entry) for entry in path]
    # JAX's own key paths end with the field of the variable that holds the array.
    while names and names[-1] in ("value", "raw_value"):
        names.pop()
    return bool(names) and names[-1] == "kernel"


def _entry_name(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
