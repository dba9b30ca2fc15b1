"""Which implementation of an operation runs."""

from __future__ import annotations

from cumulant_jax.naming import unknown_name

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")


def choose_implementation(implementation: str | None, operation: str) -> str:
    """Resolves the `implementation` argument of an attention function.

    Args:
      implementation: None for the best that supports the call, or one of `IMPLEMENTATIONS`.
      operation: name of the attention function, for messages.

    Returns:
      The name of the implementation.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation cannot do this operation.
    """
    if implementation in (None, "xla"):
        return "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(unknown_name("implementation", implementation, IMPLEMENTATIONS))
    raise NotImplementedError(
        f"{operation} has no implementation={implementation!r}; use None or 'xla'."
    )
