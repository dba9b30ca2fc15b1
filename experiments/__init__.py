"""Command-line entry points: `python -m experiments.NAME --help`."""
