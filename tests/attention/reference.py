"""The attention functions written out plainly, as the formulas stand, in any array module.

With NumPy in float64 they are the truth for outputs; with jax.numpy in float64 their automatic
derivatives are the truth for gradients. Everything is dense and quadratic on purpose. Masks come as
[*batch, heads or 1, queries or 1, keys].
"""

import jax
import jax.numpy as jnp
import numpy as np


def _heads_first(xp, query, key, value):
    groups = query.shape[-2] // key.shape[-2]
    key, value = (xp.repeat(x, groups, axis=-2) for x in (key, value))
    return tuple(xp.swapaxes(x, -3, -2) for x in (query, key, value))


def _mask(xp, mask, key, value):
    """Returns the mask and the keys and values with masked entries zeroed (key masks only)."""
    if mask is None:
        return xp.ones((1, 1, key.shape[-2]), bool), key, value
    if mask.shape[-2] == 1:
        keep = xp.swapaxes(mask, -1, -2)
        key, value = xp.where(keep, key, 0), xp.where(keep, value, 0)
    return mask, key, value


def softmax(xp, query, key, value, *, mask=None, scale=None, is_causal=False):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _heads_first(xp, query, key, value)
    mask, key, value = _mask(xp, mask, key, value)
    logits = scale * query @ xp.swapaxes(key, -1, -2)
    if is_causal:
        mask = mask & xp.tril(xp.ones(logits.shape[-2:], bool))
    highest = xp.where(mask, logits, -1e30).max(-1, keepdims=True)
    weights = xp.where(mask, xp.exp(xp.where(mask, logits - highest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return xp.swapaxes(weights / xp.where(total > 0, total, 1) @ value, -3, -2)


def linear(xp, query, key, value, *, mask=None, scale=None, eps=1e-6):
    def elu1(x):
        return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, 0, x)))

    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _heads_first(xp, query, key, value)
    mask, key, value = _mask(xp, mask, key, value)
    weights = xp.where(mask, elu1(scale * query) @ xp.swapaxes(elu1(key), -1, -2), 0)
    return xp.swapaxes(weights @ value / (weights.sum(-1, keepdims=True) + eps), -3, -2)


def cumulant(
    xp, query, key, value, *, order, offdiagonal=False, reduction="mean", mask=None, scale=None
):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = _heads_first(xp, query, key, value)
    mask, key, value = _mask(xp, mask, key, value)
    present = xp.swapaxes(mask, -1, -2)
    count = xp.maximum(present.sum(-2, keepdims=True), 1)

    def mean(x):
        return xp.where(present, x, 0).sum(-2, keepdims=True) / count

    q = scale * query
    mean_value = mean(value)
    kappa = xp.where(present, key - mean(key), 0)
    nu = xp.where(present, value - mean_value, 0)
    kappa_t = xp.swapaxes(kappa, -1, -2)
    a = q @ kappa_t
    out = mean_value + xp.zeros_like(a[..., :1])
    if order >= 2:
        out = out + a @ nu / count
    if order >= 3 and offdiagonal:
        out = out + 0.5 * a**2 @ nu / count
    elif order >= 3:
        out = out + 0.5 * (q**2 @ kappa_t**2) @ nu / count
    if order >= 4:
        variance = mean(kappa**2)
        weights = q**3 @ kappa_t**3 - 3 * (q**3 * variance) @ kappa_t
        out = out + weights @ nu / count / 6
    return xp.swapaxes(out * count if reduction == "sum" else out, -3, -2)


def token_statistics(xp, w, temperature, *, mask=None):
    if mask is not None:  # [*batch, 1, 1, tokens]
        mask = xp.swapaxes(mask, -1, -3)
        w = xp.where(mask, w, 0)
    s = w**2
    energy = xp.maximum(s.sum(-3, keepdims=True), 1e-24)
    logits = temperature * (s / energy).sum(-1)
    weights = xp.exp(logits - logits.max(-1, keepdims=True))
    membership = weights / weights.sum(-1, keepdims=True)
    if mask is not None:
        membership = membership * mask[..., 0]
    moment = (membership[..., None] * s).sum(-3) / (membership.sum(-2)[..., None] + 1e-8)
    return -w * membership[..., None] / (1 + moment[..., None, :, :])


def cross_covariance(xp, query, key, value, temperature, *, mask=None):
    query, key, value = _heads_first(xp, query, key, value)
    if mask is not None:
        keep = xp.swapaxes(mask, -1, -2)
        query, key, value = (xp.where(keep, x, 0) for x in (query, key, value))

    def unit(x):
        return x / xp.sqrt(xp.maximum((x**2).sum(-2, keepdims=True), 1e-24))

    logits = temperature[:, None, None] * (xp.swapaxes(unit(query), -1, -2) @ unit(key))
    weights = xp.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return xp.swapaxes(value @ xp.swapaxes(weights, -1, -2), -3, -2)


def output(function, inputs, **options):
    """The output in float64 NumPy."""
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    return function(np, **inputs, **options)


def gradients(function, inputs, cotangent, **options):
    """The gradient of sum(output · cotangent) for every named input, in float64."""
    with jax.enable_x64(True):
        inputs = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
        cotangent = jnp.asarray(np.asarray(cotangent, np.float64))

        @jax.jit
        def gradient(inputs):
            return jax.grad(lambda i: jnp.sum(function(jnp, **i, **options) * cotangent))(inputs)

        return {name: np.asarray(g) for name, g in gradient(inputs).items()}
