"""The plan of a run: the config's durations in steps, and what is due at which step."""

import dataclasses

from cumulant_jax.training.config import ExperimentConfig
from cumulant_jax.training.durations import Duration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Due:
    """What is to be done once a step is."""

    log: bool
    evaluate: bool
    checkpoint: bool

    def __bool__(self) -> bool:
        return self.log or self.evaluate or self.checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Durations in steps; a period of 0 means only at the end.

    Attributes:
      total: the last step.
      warmup: steps of the warm-up.
      log_every: steps between rows of training metrics.
      evaluate_every: steps between evaluations.
      checkpoint_every: steps between checkpoints.
    """

    total: int
    warmup: int
    log_every: int
    evaluate_every: int
    checkpoint_every: int

    @classmethod
    def of(cls, config: ExperimentConfig, *, num_train: int) -> "Plan":
        """Converts the durations of a config, for a training set of `num_train` examples."""

        def steps(text: str | int) -> int:
            duration = Duration.parse(text)
            return duration.steps(num_examples=num_train, batch_size=config.batch_size)

        return cls(
            total=steps(config.total),
            warmup=steps(config.optimizer.warmup),
            log_every=steps(config.log_every),
            evaluate_every=steps(config.evaluate_every),
            checkpoint_every=steps(config.checkpoint_every),
        )

    def due(self, step: int) -> Due:
        """Returns what is due after `step` (counted from 1).

        A checkpoint comes with an evaluation, by which the best is kept, and both come with a row
        of training metrics, so that the rows do not depend on where a run was interrupted.

        >>> plan = Plan(total=9, warmup=0, log_every=2, evaluate_every=4, checkpoint_every=0)
        >>> [step for step in range(1, 10) if plan.due(step)]
        [2, 4, 6, 8, 9]
        >>> plan.due(9)
        Due(log=True, evaluate=True, checkpoint=True)
        """
        last = step == self.total
        checkpoint = last or _hits(step, self.checkpoint_every)
        evaluate = checkpoint or _hits(step, self.evaluate_every)
        return Due(
            log=evaluate or _hits(step, self.log_every), evaluate=evaluate, checkpoint=checkpoint
        )


def _hits(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
