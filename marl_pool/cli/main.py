"""The ``marl-pool`` command: parse, call the verb, print an error as one line."""

import io
import os
import sys
from collections.abc import Sequence

from marl_pool.cli import evaluate, push, show, tools, train
from marl_pool.cli.arguments import answer_shell, parse, print_help
from marl_pool.cli.common import local_runs, reading, search_working_directory
from marl_pool.options.plugins import commands, load
from marl_pool.training.signals import exit_status, terminable
from marl_pool.utils.errors import (
    InputError,
    StoppedError,
    explain_missing_modules,
    foreign,
)
from marl_pool.utils.text import print_line, print_note, printable

VERBS = {
    "train": train.train,
    "sweep": train.sweep,
    "evolve": train.train,
    "clone": train.train,
    "fit": train.train,
    "resume": train.resume,
    "evaluate": evaluate.evaluate,
    "render": evaluate.render,
    "play": evaluate.play,
    "report": evaluate.report,
    "export": tools.export,
    "push": push.push,
    "check-env": tools.check_env,
    "show": show.show,
    "ls": show.ls,
    "list": tools.list_registered,
    "help": tools.show_help,
}
"""Functions of flags and overrides that return the exit status; packages add more."""
MAKING = ("train", "sweep", "evolve", "clone", "fit", "check-env")
"""Verbs that take all names from the user: modules may be in the working directory."""
READING = ("evaluate", "render", "play", "report", "export", "push")
"""Verbs that read files from others, which may only name what the user allows."""
WORKING = (*MAKING, "resume", *READING)
"""Verbs that announce themselves before they import torch and ray."""
KEYLESS = ("push", "show", "ls", "list", "help")
"""Verbs without a configuration."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0 for success; 1 if training or a trial of a sweep failed, or for an
    error of the machine, such as a full disk; 2 for bad input; 75 if a time limit ended
    a run with ``--or-resume``; 130, 143 and 138 after Ctrl-C, SIGTERM and SIGUSR1.

    Args:
        arguments: without the program's name; None takes them from ``sys.argv``.
    """
    for stream in (sys.stdout, sys.stderr):
        # Some terminals and pipes know ASCII only.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with explain_missing_modules(), terminable():
            status = _main(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:  # None where it was closed
            sys.stdout.flush()  # so that a closed pipe is handled below
        return status
    except InputError as error:
        # Paths in the message may contain control characters.
        print_line(error)
        return 1 if isinstance(error, StoppedError) else 2
    except KeyboardInterrupt as error:
        print_line("stopped")
        return exit_status(error)
    except BrokenPipeError:
        _give_up_stdout()  # its reader is gone
        return 1
    except BaseException as error:
        # An error of a file names it; an error without a name may be of a stream.
        is_unnamed = isinstance(error, OSError) and error.filename is None
        if is_unnamed and _stdout_fails():
            _give_up_stdout()
            line = f"the output cannot be written: {error}"
        elif not (line := foreign(error)):
            raise
        print_line(line)
        return 1


def _stdout_fails() -> bool:
    try:
        print(flush=True)  # the text that failed has left the buffer
    except OSError:
        return True
    return False


def _give_up_stdout() -> None:
    """Discard text that cannot be written, so that Python's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(arguments: list[str]) -> int:
    answer_shell()
    if not arguments:
        print_help()
        return 0
    namespace, overrides = parse(arguments)
    command = commands().get(namespace.verb)
    is_keyless = namespace.verb in KEYLESS or (command and not command.settings)
    if overrides and is_keyless:
        raise InputError(f"{namespace.verb} takes no keys, got {overrides[0]!r}")
    if namespace.verb in MAKING:
        search_working_directory()
    # Imports take seconds: show a person at once what has started.
    shows_config = getattr(namespace, "cfg", 0)
    is_reading = namespace.verb in READING or (command and command.settings)
    is_working = namespace.verb in WORKING or is_reading
    if is_working and sys.stderr.isatty() and not shows_config:
        runs = getattr(namespace, "run", None) or []
        paths = [runs] if isinstance(runs, str) else runs
        words = ["marl-pool", namespace.verb, *paths, *overrides]
        print_note(f"{printable(' '.join(words))}: starting")
    run_verb = load(command.function) if command else VERBS[namespace.verb]
    if not is_reading:
        return run_verb(namespace, overrides)
    with reading(namespace, overrides), local_runs(namespace):
        return run_verb(namespace, overrides)
