"""What the conformance suite tests: every attention function, in every implementation.

A new implementation joins by its name in IMPLEMENTATIONS, a new function by a Subject.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import cumulant_jax as cj
from tests.attention import reference

IMPLEMENTATIONS = ("xla",)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One attention function with its plain counterpart.

    `call(inputs, mask, **options)` takes a dict of named inputs and a mask [*batch, H|1, 1, S].
    """

    name: str
    call: Callable
    reference: Callable
    inputs: tuple[str, ...] = ("query", "key", "value")
    linear_time: bool = True

    def __str__(self):
        return self.name

    @property
    def masked(self) -> set[str]:
        """The inputs whose masked tokens may hold anything."""
        return {"key", "value"} if self.takes_queries else set(self.inputs) - {"temperature"}

    @property
    def takes_queries(self) -> bool:
        """Whether queries and keys are separate tokens, so that T ≠ S is allowed."""
        return self.inputs == ("query", "key", "value")


def _pairwise(kind):
    def call(inputs, mask=None, **options):
        return cj.attention(
            kind, inputs["query"], inputs["key"], inputs["value"], mask=mask, **options
        )

    return call


def _token_statistics(inputs, mask=None, **options):
    mask = None if mask is None else mask[..., 0, 0, :]
    return cj.token_statistics_attention(
        inputs["w"], temperature=inputs["temperature"], mask=mask, **options
    )


def _cross_covariance(inputs, mask=None, **options):
    mask = None if mask is None else mask[..., 0, 0, :]
    query, key, value, temperature = (inputs[n] for n in ("query", "key", "value", "temperature"))
    return cj.cross_covariance_attention(
        query, key, value, temperature=temperature, mask=mask, **options
    )


def _cumulant(name, **options):
    return Subject(name, _pairwise(name), functools.partial(reference.cumulant, **options))


SUBJECTS = {
    s.name: s
    for s in (
        Subject("softmax", _pairwise("softmax"), reference.softmax, linear_time=False),
        Subject("linear", _pairwise("linear"), reference.linear),
        _cumulant("cumulant2", order=2),
        _cumulant("cumulant3", order=3),
        _cumulant("cumulant3_full", order=3, offdiagonal=True),
        _cumulant("cumulant4", order=4),
        Subject(
            "token_statistics",
            _token_statistics,
            reference.token_statistics,
            inputs=("w", "temperature"),
        ),
        Subject(
            "cross_covariance",
            _cross_covariance,
            reference.cross_covariance,
            inputs=("query", "key", "value", "temperature"),
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one case: [*batch, queries|keys, heads|key_heads, dim|value_dim]."""

    batch: tuple[int, ...] = (2,)
    queries: int = 12
    keys: int = 12
    heads: int = 2
    key_heads: int = 2
    dim: int = 8
    value_dim: int = 8

    def __str__(self):
        batch = "x".join(map(str, self.batch)) or "none"
        tokens = f"t{self.queries}s{self.keys}h{self.heads}k{self.key_heads}"
        return f"b{batch}-{tokens}-d{self.dim}v{self.value_dim}"

    def for_subject(self, subject: Subject) -> "Shape":
        """The nearest shape that the subject allows."""
        if subject.takes_queries:
            return self
        return dataclasses.replace(self, queries=self.keys, value_dim=self.dim)


def make_inputs(subject: Subject, shape: Shape, *, seed: int, dtype=jnp.float32) -> dict:
    """Random inputs by name, rounded to `dtype`."""
    random = np.random.default_rng(seed)
    shape = shape.for_subject(subject)
    sizes = {
        "query": (*shape.batch, shape.queries, shape.heads, shape.dim),
        "key": (*shape.batch, shape.keys, shape.key_heads, shape.dim),
        "value": (*shape.batch, shape.keys, shape.key_heads, shape.value_dim),
        "w": (*shape.batch, shape.keys, shape.heads, shape.dim),
        "temperature": (shape.heads,),
    }
    inputs = {n: random.standard_normal(sizes[n]) for n in subject.inputs}
    if "temperature" in inputs:
        inputs["temperature"] = 1 + 0.5 * inputs["temperature"]
    if "temperature" in inputs and "query" in inputs:
        # Features are scaled to unit norm over the tokens. With one token that divides by its size,
        # and the rounding of the gradient, zero in exact arithmetic, by it again: so none is tiny.
        for name in ("query", "key"):
            inputs[name] += np.copysign(0.5, inputs[name])
    return {n: jnp.asarray(x, dtype) for n, x in inputs.items()}
