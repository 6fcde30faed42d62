"""The ``marl-pool`` command: parse, call, refuse in one line."""

import os
import sys
from collections.abc import Sequence

from marl_pool.cli import evaluate as measuring
from marl_pool.cli import inspect as listing
from marl_pool.cli import train as making
from marl_pool.cli.arguments import parse, print_help
from marl_pool.cli.common import search_working_directory
from marl_pool.utils.errors import InputError
from marl_pool.utils.extras import explain_missing_modules
from marl_pool.utils.text import printable

VERBS = {
    "train": making.train,
    "sweep": making.sweep,
    "evolve": making.evolve,
    "clone": making.clone,
    "fit": making.fit,
    "resume": making.resume,
    "evaluate": measuring.evaluate,
    "diagnose": measuring.diagnose,
    "render": measuring.render,
    "report": measuring.report,
    "import-weights": listing.import_weights,
    "list": listing.list_registered,
}
"""By name: from flags and overrides to the exit status."""
MAKING = ("train", "sweep", "evolve", "clone", "fit")
"""Verbs that take all names from the user: modules of theirs may lie where they are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 if trials of a sweep failed, 2 for bad input, 130 if stopped.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    try:
        with explain_missing_modules():
            status = _main(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a closed pipe can be told from a fault
        return status
    except InputError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("marl-pool: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has enough of it; Python must not try to flush more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments:
        print_help()
        return 0
    known, overrides = parse(arguments)
    if known.verb in MAKING:
        # The verbs that read what others may have made look there only for plug-ins.
        search_working_directory()
    return VERBS[known.verb](known, overrides)


def _refuse(message: str) -> int:
    # A path in it may hold anything.
    print(f"marl-pool: {printable(message)}", file=sys.stderr)
    return 2
