"""Writes the weights of a run's checkpoint into a safetensors file.

    python -m experiments.export --directory runs/x --output x.safetensors
    python -m experiments.export --directory runs/x --checkpoint best --output x.safetensors

The moving average is written where the run keeps one. Each array is named by its place in the model
("blocks.0.attention.qkv.kernel"); the file's metadata holds the run's config as JSON, the step and
which parameters they are. `cumulant_jax.training.load_weights` reads it.
"""

import argparse
import json
import sys
from pathlib import Path

from cumulant_jax.training import RunDirectory, build, save_weights
from experiments import cli
from experiments.evaluate import restore


def main(args: argparse.Namespace) -> None:
    """Exports as the arguments say."""
    run = RunDirectory(args.directory)
    experiment = build(run.config())
    step, state = restore(run, experiment, args.checkpoint)
    use_average = args.parameters == "auto" and state.ema is not None
    save_weights(
        args.output,
        state.eval_params if use_average else state.params,
        state.model_state,
        metadata={
            "config": json.dumps(experiment.config.to_dict()),
            "step": str(step),
            "parameters": "ema" if use_average else "raw",
        },
    )
    print(f"step {step}: {experiment.num_parameters:,} parameters in {args.output}")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of this command."""
    parser = cli.make_parser(__doc__, config=False)
    parser.add_argument("--output", type=Path, required=True, help="the safetensors file")
    parser.add_argument(
        "--checkpoint", default="last", help="'last' (the default), 'best' or a step"
    )
    parser.add_argument(
        "--parameters",
        choices=("auto", "raw"),
        default="auto",
        help="the moving average where there is one, or the raw parameters",
    )
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, make_parser()))
