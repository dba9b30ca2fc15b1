"""What all command lines share: the config flag, and one clear line for every error.

    parser = cli.make_parser(__doc__)
    parser.add_argument("--seeds", default="0")

    def main(args):          # args.config is an ExperimentConfig, args.directory a Path
        ...

    if __name__ == "__main__":
        sys.exit(cli.run(main, parser))

Exit codes: 0 done, 1 training failed (a loss that is not finite, another process that was lost),
2 wrong input, 128 + N stopped by signal N.
"""

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from cumulant_jax.naming import unknown_name
from cumulant_jax.training import Interrupted, NonFiniteError, load_config
from cumulant_jax.training.compilation_cache import enable_compilation_cache
from cumulant_jax.training.processes import ProcessFlags, start_processes

_OVERRIDE = re.compile(r"--?config\.")
# What the transports of XLA and its coordination service say of a process that is gone.
_LOST = re.compile(r"gloo|peer|connection|heartbeat|coordination|nccl|unavailable", re.IGNORECASE)
_REPOSITORY = Path(__file__).resolve().parent.parent


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors instead of printing usage and exiting."""

    def error(self, message: str):
        raise ValueError(f"{message} (see --help).")


def make_parser(
    description: str | None, *, config: bool = True, directory: Path | None = None
) -> argparse.ArgumentParser:
    """Makes a parser with --directory, --traceback and, unless `config` is False, --config.

    Args:
      description: the text of --help; pass the module's `__doc__`.
      config: whether the command takes `--config file.py[:arguments]` and `--config.key=value`.
      directory: the default of `--directory`, which must be given where this is None.
    """
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config:
        parser.add_argument(
            "--config",
            required=True,
            metavar="FILE.py[:KEY=VALUE,…]",
            help="the config file and its arguments; --config.KEY=VALUE overrides a key",
        )
    parser.add_argument(
        "--directory",
        type=Path,
        required=directory is None,
        default=directory,
        help="the run directory" if directory is None else f"what is written (default {directory})",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised, for reporting it"
    )
    return parser


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags by which several processes find each other where no launcher tells them."""
    group = parser.add_argument_group("several processes (not needed with srun, mpirun or GKE)")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 waits for the others; 'auto' on the hosts of a TPU pod",
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="I", help="the number of this one, from 0")


def run(
    main: Callable[[argparse.Namespace], int | None],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the arguments, runs `main` and turns errors into one line and an exit code.

    Args:
      main: gets the parsed arguments, `args.config` loaded; returns an exit code or None for 0.
      parser: from `make_parser`, with the command's own options added.
      argv: the arguments; those of the process by default.

    Returns:
      The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(parser, argv)
        several = "coordinator" in args and _start_processes(args)
    except Exception as error:
        return _exit_code(error, argv)
    try:
        enable_compilation_cache()
        return main(args) or 0
    except (Exception, KeyboardInterrupt) as error:
        if not several or isinstance(error, Interrupted):
            return _exit_code(error, argv)
        # Without a goodbye, which would wait for the others: they notice, and stop too.
        os._exit(_exit_code_among_several(error, argv))


def _start_processes(args: argparse.Namespace) -> bool:
    return start_processes(
        ProcessFlags(
            coordinator=args.coordinator,
            num_processes=args.num_processes,
            process_id=args.process_id,
        )
    )


def _exit_code(error: BaseException, argv: Sequence[str]) -> int:
    """Says what happened in one line, or raises what is no user's matter."""
    match error:
        case Interrupted():
            _say(str(error))
            return error.exit_code
        case KeyboardInterrupt():
            _say("interrupted")
            return 130
        case NonFiniteError():
            return _report(error, argv, code=1)
        case ValueError() | TypeError() | LookupError() | NotImplementedError() | OSError():
            if _is_for_the_user(error):
                return _report(error, argv, code=2)
    raise error


def _exit_code_among_several(error: BaseException, argv: Sequence[str]) -> int:
    is_lost = isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error))
    if is_lost:
        error = ConnectionError(
            f"process {jax.process_index()} stops, as it lost another one "
            f"({str(error).splitlines()[0][:200]}). Start all again: they go on from the last "
            "checkpoint."
        )
    try:
        code = _report(error, argv, code=1) if is_lost else _exit_code(error, argv)
    except BaseException:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    # "--config.key value" is joined, so that overrides are recognised by their form alone.
    overrides, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not _OVERRIDE.match(word):
            rest.append(word)
        elif "=" in word or not words or words[0].startswith("-"):
            overrides.append(word)
        else:
            overrides.append(f"{word}={words.pop(0)}")
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in rest:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise ValueError(unknown_name("argument", name, known))
    args = parser.parse_args(rest)
    if hasattr(args, "config"):
        args.config = load_config(args.config, overrides)
    elif overrides:
        raise ValueError(f"{overrides[0]}: this command takes its config from --directory.")
    return args


def _is_for_the_user(error: BaseException) -> bool:
    """Whether our own code raised the error, or the system did (a missing file, a full disk).

    What a library raises by itself is a bug, ours or its own, and shows its traceback.
    """
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    where = Path(frames[-1].filename).resolve()
    package = Path(importlib.import_module("cumulant_jax").__file__ or "").resolve().parent
    user_code = where.name.endswith(".py") and "site-packages" not in where.parts
    return where.is_relative_to(package) or (user_code and where.is_relative_to(_REPOSITORY))


def _report(error: BaseException, argv: Sequence[str], *, code: int) -> int:
    if "--traceback" in argv:
        traceback.print_exception(error)
    _say(f"error: {error}")
    return code


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr, flush=True)
