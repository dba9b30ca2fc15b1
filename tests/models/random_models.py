"""Small models whose every parameter is random, and their losses and gradients."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cumulant_jax import models


def random_model(name, *, seed=0, **options):
    """A model by name with every parameter random.

    The numbers depend on the seed and the parameter's name and shape alone, so that models that
    differ in an option agree in the parameters they share. They come from NumPy: initialising on
    the device would compile a program for each shape.
    """
    model = nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0), **options))
    graphdef, abstract = nnx.split(model)
    draw = functools.partial(_draw, seed)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, abstract))


def _draw(seed, path, leaf):
    rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()) + seed)
    if "'var'" in jax.tree_util.keystr(path):
        return jnp.asarray(0.5 + rng.random(leaf.shape), leaf.dtype)
    center = 1.0 if "scale" in jax.tree_util.keystr(path[-2:]) else 0.0
    return jnp.asarray(center + 0.3 * rng.standard_normal(leaf.shape), leaf.dtype)


@jax.jit
def apply(model, *inputs, **arrays):
    """model(*inputs, **arrays) as one compiled program: quicker than operation by operation."""
    return model(*inputs, **arrays)


@jax.jit
def extend(model, *inputs, **arrays):
    """The same for model.extend."""
    return model.extend(*inputs, **arrays)


def loss_and_gradients(model, loss):
    """The value of loss(model) and its gradients by dotted path, through split state under jit."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params):
        return jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p, rest)))(params)

    value, gradients = run(params)
    return value, by_path(gradients)


def by_path(state):
    """The arrays of a state by dotted path."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
