"""Trains one model, or goes on with a run that was interrupted.

    python -m experiments.train --config configs/digits.py:attention=cumulant3 --directory runs/x
    python -m experiments.train --config configs/cifar10.py:attention=cumulant3,variant=ti4 \
        --config.batch_size=256 --directory runs/y

Several processes train together where srun, mpirun or a TPU pod starts them, or by flags:

    python -m experiments.train … --coordinator=host0:9876 --num-processes=2 --process-id=0

Ctrl-C (or SIGTERM) finishes the step, saves and exits; the same command goes on from there.
"""

import argparse
import sys

from cumulant_jax import training
from experiments import cli


def main(args: argparse.Namespace) -> None:
    """Trains as the arguments say."""
    training.train(
        args.config, args.directory, stop_after=args.stop_after, checkpoints=args.checkpoints
    )


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of this command."""
    parser = cli.make_parser(__doc__)
    parser.add_argument(
        "--checkpoints",
        metavar="PLACE",
        help="where checkpoints go, such as gs://bucket/run; by default into the run directory",
    )
    cli.add_process_flags(parser)
    parser.add_argument(
        "--stop-after",
        metavar="DURATION",
        help="save and end after this many steps (or '2 epochs'), to go on another time",
    )
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main, make_parser()))
