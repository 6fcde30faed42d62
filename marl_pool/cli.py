"""The ``marl-pool`` command: parse, compose, check, call.

Whatever is heavy loads inside the verb that needs it, so that help and refusals come
at once.
"""

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool import names
from marl_pool.arguments import KINDS, RESOURCES, parse, print_help
from marl_pool.errors import InputError, StoppedError

if TYPE_CHECKING:
    from marl_pool.runs import Run

EXTRAS = {
    "ray": "rllib",
    "tensorboardX": "rllib",
    "matplotlib": "plots",
    "cv2": "plots",
}
"""Which extra installs a module that the base installation lacks."""
RESUMABLE = ("total_steps", "time_limit", "checkpoint", "resources")
"""Keys, with those below them, that ``resume`` may change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 130 if stopped.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    try:
        return _main(sys.argv[1:] if arguments is None else list(arguments))
    except InputError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _refuse(_install(str(error.name), extra))
    except KeyboardInterrupt:
        print("marl-pool: stopped", file=sys.stderr)
        return 130


def _main(arguments: list[str]) -> int:
    # A user's own modules are found from where the command is given.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not arguments:
        print_help()
        return 0
    known, overrides = parse(arguments)
    return VERBS[known.verb](known, overrides)


def _train(arguments: Namespace, overrides: list[str]) -> int:
    for key in RESOURCES:
        if (value := getattr(arguments, key)) is not None:
            overrides.append(f"resources.{key}={_quoted(value)}")
    config = _composed("train", arguments, overrides)
    if config is None:
        return 0
    if importlib.util.find_spec("ray") is None:
        raise InputError(_install("ray", "rllib"))
    from marl_pool.runs import Run, default_path

    run = Run.create(arguments.run_dir or default_path(config), config)
    try:
        return _run_training(run, config)
    except StoppedError:
        raise
    except InputError:
        run.discard_if_unused()
        raise


def _resume(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import assign, check, parse

    run = _open_run(arguments)
    for text in overrides:
        key = parse(text).key_or_group
        if key.split(".")[0] not in RESUMABLE:
            raise InputError(
                f"{key}: a resumed run takes only {', '.join(RESUMABLE)}; "
                "for anything else start a new run"
            )
    try:
        config = check("train", assign(run.config, overrides))
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from error
    return _run_training(run, config)


def _run_training(run: "Run", config: dict[str, Any]) -> int:
    try:
        with run.lock():
            from marl_pool.training.ppo import train

            train(run, config)
    except KeyboardInterrupt:
        print(
            f"marl-pool: stopped; go on with: marl-pool resume {run.path}",
            file=sys.stderr,
        )
        return 130
    finally:
        run.close()
    _print_paths([run.path, *filter(Path.exists, (run.metrics_path, run.policy_dir))])
    return 0


def _evaluate(arguments: Namespace, overrides: list[str]) -> int:
    settings = _composed("evaluate", arguments, overrides)
    if settings is None:
        return 0
    run = _open_run(arguments)
    from marl_pool.evaluation.robustness import evaluate_run

    _print_paths(evaluate_run(run, settings, plugins=arguments.plugin))
    return 0


def _render(arguments: Namespace, overrides: list[str]) -> int:
    settings = _composed("render", arguments, overrides)
    if settings is None:
        return 0
    run = _open_run(arguments)
    from marl_pool.evaluation.video import render_run

    _print_paths([render_run(run, settings, plugins=arguments.plugin)])
    return 0


def _list(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import registry
    from marl_pool.config.signatures import summary

    if overrides:
        raise InputError(f"list takes no keys, got {overrides[0]!r}")
    if arguments.kind and arguments.kind not in KINDS:
        raise names.unknown("registry", arguments.kind, KINDS)
    for kind in [arguments.kind] if arguments.kind else KINDS:
        if not arguments.kind:
            print(f"{kind}:")
        for name, target in sorted(registry(kind).items()):
            print(f"  {name:<16} {summary(target)}")
    return 0


VERBS = {
    "train": _train,
    "resume": _resume,
    "evaluate": _evaluate,
    "render": _render,
    "list": _list,
}


def _composed(
    verb: str, arguments: Namespace, overrides: list[str]
) -> dict[str, Any] | None:
    """Compose and check; with ``--cfg`` print the result and return None."""
    from marl_pool.config import check, commented, compose_only

    composed, chosen = compose_only(verb, overrides, arguments.config_dir)
    checked = check(verb, composed)
    if not arguments.cfg:
        return checked
    print(commented(verb, checked, chosen, arguments.config_dir), end="")
    return None


def _open_run(arguments: Namespace) -> "Run":
    from marl_pool.runs import Run

    if arguments.run is None:
        raise InputError(f"{arguments.verb}: expected the folder of a run, got none")
    return Run.open(arguments.run)


def _quoted(value: str) -> str:
    """A flag's value in Hydra's syntax: a number as it is, else a quoted string."""
    try:
        float(value)
    except ValueError:
        return "'" + value.replace("'", r"\'") + "'"
    return value


def _install(module: str, extra: str) -> str:
    return f'this needs {module}: pip install "marl-pool[{extra}]"'


def _refuse(message: str) -> int:
    print(f"marl-pool: {message}", file=sys.stderr)
    return 2


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)
