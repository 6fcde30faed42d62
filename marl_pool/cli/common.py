"""Steps shared by several verbs: compose, open a run, print written paths."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.cli.arguments import KEY_FLAGS
from marl_pool.files.hub import is_hub
from marl_pool.options import names
from marl_pool.options.plugins import user_plug_ins
from marl_pool.training.signals import exit_status
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import is_url, print_line, print_note, printable, quoted

if TYPE_CHECKING:
    from marl_pool.runs.run import Run


def composed(arguments: Namespace, overrides: list[str]) -> dict[str, Any] | None:
    """Compose and check a configuration; with ``--cfg``, print it and return None."""
    from marl_pool.config import compose

    verb, folder = arguments.verb, arguments.config_dir
    config = compose(verb, [*overrides, *flags_as_keys(arguments)], folder)
    if not arguments.cfg:
        return config
    print_config(verb, config, folder)
    return None


def print_config(verb: str, config: Mapping[str, Any], config_dir: Path | None) -> None:
    """Print a checked configuration as YAML with comments."""
    from marl_pool.config import commented

    print(commented(verb, config, config_dir), end="")


@contextmanager
def reading(
    arguments: Namespace, overrides: Sequence[str], command: str = ""
) -> Iterator[None]:
    """Restrict imports to plug-ins that the user named on the command line.

    The names in ``--plugin`` and in typed overrides are allowed; names in files are not
    (`marl_pool.options.names.trust`). Only allowed names put the working directory on
    the search path.

    Args:
        arguments: parsed flags.
        overrides: ``key=value`` as typed.
        command: command to suggest with ``--plugin``; empty suggests the flag alone.
    """
    from marl_pool.config import parse

    # Names that the user typed are allowed, wherever they stand in an override.
    parsed = [parse(text) for text in overrides]
    typed = names.texts_in([override.value for override in parsed])
    modules = any(override.key == "env.module" for override in parsed)
    if arguments.plugin or modules or any(map(names.is_plug_in, typed)):
        search_working_directory()
    # Plug-ins that the user always trusts are installed, not in the working directory.
    arguments.plugin = [*arguments.plugin, *user_plug_ins()]
    allowed = {*arguments.plugin, *typed}
    with names.trust(allowed, f"the configuration of {arguments.verb}", command):
        yield


@contextmanager
def local_runs(arguments: Namespace) -> Iterator[None]:
    """Replace runs given as URLs by copies in the user's cache.

    Policies on the hub keep their names, which results record.
    """
    runs = arguments.run if isinstance(arguments.run, list) else []
    if all(is_hub(run) or not is_url(run) for run in runs):
        yield
        return
    from marl_pool.runs.mirrored import local_copies

    with local_copies(runs) as arguments.run:
        yield


def search_working_directory() -> None:
    """Put the working directory on the module search path."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def open_run(verb: str, path: str | None) -> "Run":
    """Open a run; all verbs but ``resume`` and ``show`` need a policy."""
    from marl_pool.runs.run import Run
    from marl_pool.runs.sweep import TRIALS, Sweep

    if path is None:
        raise InputError(f"{verb}: expected the folder of a run, got none")
    if is_hub(path):
        raise InputError(f"{verb}: expected a run, got the policy {path}")
    if verb != "resume" and Sweep.is_at(path):
        raise InputError(
            f"{verb}: expected runs, got the sweep {path}: its runs are "
            f"{quoted(Path(path, TRIALS))}/*"
        )
    run = Run.open(path)
    # A fit has no policy that the other verbs could read.
    if run.verb == "fit" and verb not in ("resume", "show"):
        from marl_pool.training.jobs import JOBS

        raise InputError(
            f"{verb}: expected a run that has a policy, got {path}, made by fit: its "
            f"results are in {JOBS[run.verb].result}"
        )
    return run


@contextmanager
def naming_file(file: Path) -> Iterator[None]:
    """Name the file whose values are checked inside the block."""
    try:
        yield
    except names.UntrustedError:
        raise  # its message names the run
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def flags_as_keys(arguments: Namespace) -> list[str]:
    """Return the given flags as overrides of their keys."""
    keys = KEY_FLAGS.get(arguments.verb, ())
    values = {key: getattr(arguments, key) for key in keys}
    return [as_key(key, value) for key, value in values.items() if value is not None]


def as_key(key: str, value: str) -> str:
    """Return ``key=value`` for a number, or for text taken literally."""
    from marl_pool.options.overrides import scalar, written

    number = type(scalar(value)) in (int, float)
    return f"{key}={value if number else written(value)}"


def stopped(error: KeyboardInterrupt, path: Path, *configs: Mapping[str, Any]) -> int:
    """Print the command that resumes, and return the exit status of Ctrl-C."""
    command = resume_command(path, *configs)
    print_line(f"stopped; resume with: {command}")
    return exit_status(error)


def resume_command(path: Path, *configs: Mapping[str, Any]) -> str:
    """Return the command that resumes a run or sweep.

    It allows the plug-ins that ``configs`` name.
    """
    flags = plugin_flags(set().union(*map(names.plug_ins_in, configs)))
    return f"marl-pool resume {quoted(path)}{flags}"


def plugin_flags(plugins: Iterable[str]) -> str:
    """Return the flags that allow plug-ins, each after a space."""
    return "".join(f" --plugin {quoted(name)}" for name in sorted(set(plugins)))


def print_next(*commands: str) -> None:
    """Print suggested next commands to stderr, where only a person reads them."""
    for place, command in enumerate(commands):
        print_note(f"{'     ' if place else 'next:'} {command}")


def next_commands(run: "Run") -> list[str]:
    """Return commands that can follow training, or the run's evaluation."""
    path = quoted(run.path)
    flags = plugin_flags(names.plug_ins_in(run.config))
    verbs = ("render", "report") if _is_evaluated(run) else ("evaluate",)
    reads = [f"marl-pool {verb} {path}{flags}" for verb in verbs]
    reads = reads if run.policy_dir.is_dir() else []
    logged = any(run.path.glob("events.out.tfevents*"))
    return [*reads, *([f"tensorboard --logdir {path}"] if logged else [])]


def _is_evaluated(run: "Run") -> bool:
    """Return True if there is a readable evaluation of the current policy."""
    from marl_pool.files.reading import read_json

    for file in run.evaluation_dir.glob("results*.json"):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            if not run.superseded(read_json(file)):
                return True
    return False


def print_paths(paths: Sequence[Path]) -> None:
    """Print one line per path."""
    for path in paths:
        print(printable(path))
