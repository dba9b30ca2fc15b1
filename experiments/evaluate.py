"""Evaluates a checkpoint of a run and writes the result as JSON.

    python -m experiments.evaluate --directory runs/x
    python -m experiments.evaluate --directory runs/x --checkpoint best --parameters raw
    python -m experiments.evaluate --directory runs/x --batch-size 500 --output result.json

The last checkpoint is the default, as training and comparisons report it. "best" was chosen on the
evaluation split, so its result is optimistic. The result does not depend on the batch size: every
example counts exactly once.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import jax

from cumulant_jax.training import Checkpoints, Experiment, RunDirectory, TrainState, build
from cumulant_jax.training.processes import is_first
from cumulant_jax.training.run_directory import write_json
from experiments import cli


def main(args: argparse.Namespace) -> None:
    """Evaluates as the arguments say and prints the result."""
    run = RunDirectory(args.directory)
    experiment = build(run.config())
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch-size: got {args.batch_size}, expected at least 1.")
    if args.parameters == "ema" and experiment.config.ema_decay is None:
        raise ValueError("--parameters: got 'ema', but the run keeps no moving average.")
    step, state = restore(run, experiment, args.checkpoint)
    ema = args.parameters != "raw" and state.ema is not None
    with jax.set_mesh(experiment.mesh):
        eval_step = experiment.eval_step()
        scores = experiment.evaluate(eval_step, state, batch_size=args.batch_size, ema=ema)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise ValueError(f"--checkpoint: that of step {step} gives {value} as {name}.")
    result = {
        "step": step,
        "parameters": "ema" if ema else "raw",
        "num_examples": experiment.task.num_eval,
        **scores,
    }
    if is_first():
        print(json.dumps(result))
        write_json(args.output or run.path / f"evaluation-{step}.json", result)


def restore(run: RunDirectory, experiment: Experiment, choice: str) -> tuple[int, TrainState]:
    """Restores a checkpoint of a run: "last", "best" or a step; returns its step and state.

    Raises:
      FileNotFoundError: the run has no checkpoint yet.
      ValueError: there is no such checkpoint.
    """
    if not run.checkpoints.is_dir():
        raise FileNotFoundError(f"--directory: the run in {str(run.path)!r} has no checkpoint yet.")
    with Checkpoints(
        run.checkpoints,
        metric=experiment.task.main_metric,
        larger_is_better=experiment.task.larger_is_better,
        read_only=True,
    ) as checkpoints:
        step = _choose_step(choice, checkpoints, run)
        return step, checkpoints.restore(step, experiment.shapes).state


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of this command."""
    parser = cli.make_parser(__doc__, config=False)
    cli.add_process_flags(parser)
    parser.add_argument(
        "--checkpoint", default="last", help="'last' (the default), 'best' or a step"
    )
    parser.add_argument(
        "--parameters",
        choices=("auto", "ema", "raw"),
        default="auto",
        help="the moving average, the raw parameters, or the average where there is one",
    )
    parser.add_argument("--batch-size", type=int, help="by default that of the run")
    parser.add_argument("--output", type=Path, help="the JSON file; by default in the directory")
    return parser


def _choose_step(choice: str, checkpoints: Checkpoints, run: RunDirectory) -> int:
    steps = checkpoints.steps
    if not steps:
        raise FileNotFoundError(f"--directory: the run in {str(run.path)!r} has no checkpoint yet.")
    named = {"best": checkpoints.best_step, "last": checkpoints.latest_step}
    # Looked up as texts: not all that Python calls digits makes an int.
    step = named.get(choice, {str(step): step for step in steps}.get(choice))
    if step not in steps:
        raise ValueError(
            f"--checkpoint: got {choice!r}, expected 'best' (a checkpoint that was evaluated), "
            f"'last' or one of the steps {', '.join(map(str, steps))}."
        )
    return step


if __name__ == "__main__":
    sys.exit(cli.run(main, make_parser()))
