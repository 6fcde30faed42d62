"""The ``marl-pool`` command: parse, compose, check, call.

Whatever is heavy loads inside the verb that needs it, so that help and refusals come
at once.
"""

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool import names
from marl_pool.arguments import KINDS, RESOURCES, SWEEP_FLAGS, parse, print_help
from marl_pool.errors import InputError, StoppedError

if TYPE_CHECKING:
    from marl_pool.config.grid import Plan
    from marl_pool.runs import Run
    from marl_pool.sweeps import Sweep

EXTRAS = {
    "ray": "rllib",
    "tensorboardX": "rllib",
    "matplotlib": "plots",
    "cv2": "plots",
    "ale_py": "atari",
}
"""Which extra installs a module that the base installation lacks."""
RESUMABLE = ("total_steps", "time_limit", "checkpoint", "resources")
"""Keys, with those below them, that ``resume`` may change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 if trials of a sweep failed, 2 for bad input, 130 if stopped.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    try:
        return _main(sys.argv[1:] if arguments is None else list(arguments))
    except InputError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        return _refuse(_install(module, EXTRAS[module]))
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
    overrides += _flags_as_keys("resources", RESOURCES, arguments)
    config = _composed("train", arguments, overrides)
    if config is None:
        return 0
    _require_ray()
    from marl_pool.runs import Run, default_path

    run = Run.create(arguments.run_dir or default_path(config), config)
    try:
        return _run_training(run, config)
    except StoppedError:
        raise
    except Exception:
        run.discard_if_unused()
        raise


def _sweep(arguments: Namespace, overrides: list[str]) -> int:
    overrides += _flags_as_keys("sweep", SWEEP_FLAGS, arguments)
    from marl_pool.config import check, commented, compose_only, plan_sweep
    from marl_pool.sweeps import Sweep, default_path

    plan = plan_sweep(overrides, arguments.config_dir)
    if arguments.cfg:
        composed, chosen = compose_only("sweep", plan.overrides, arguments.config_dir)
        checked = check("sweep", {**composed, "grid": plan.grid})
        print(commented("sweep", checked, chosen, arguments.config_dir), end="")
        return 0
    env = plan.trials[0].config["env"]["name"].rpartition(":")[2]
    path = arguments.sweep_dir or default_path(env)
    if Sweep.is_at(path):
        raise InputError(
            f"{path} exists; choose another --sweep-dir or `marl-pool resume {path}`"
        )
    sweep = Sweep(path, plan.grid, plan.overrides, arguments.config_dir)
    return _run_sweep(sweep, plan, arguments.dry_run)


def _run_sweep(sweep: "Sweep", plan: "Plan", dry_run: bool = False) -> int:
    from marl_pool.config.grid import refuse_other_runs

    refuse_other_runs(sweep, plan)
    _require_ray()
    from marl_pool.training.settings import SweepSettings
    from marl_pool.training.sweep.run import run_sweep

    settings = SweepSettings(**plan.settings)
    try:
        failed = run_sweep(sweep, plan.trials, settings, dry_run)
    except KeyboardInterrupt:
        if not sweep.is_at(sweep.path):
            raise
        return _stopped(sweep.path)
    if not dry_run:
        _print_paths([sweep.path, sweep.table_path(settings.format)])
    for name, reason in failed.items():
        print(f"marl-pool: {name} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _resume(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import assign, check
    from marl_pool.sweeps import Sweep

    if arguments.run is not None and Sweep.is_at(arguments.run):
        return _resume_sweep(Sweep.open(arguments.run), overrides)
    run = _open_run(arguments)
    _refuse_unless(RESUMABLE, overrides)
    try:
        config = check("train", assign(run.config, overrides))
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from error
    if run.steps_saved >= config["total_steps"]:
        done, wanted = run.steps_saved, config["total_steps"]
        print(f"{run.path}: {done:,} of {wanted:,} steps are done; nothing to do")
        return 0
    return _run_training(run, config)


def _resume_sweep(sweep: "Sweep", overrides: list[str]) -> int:
    from marl_pool.config import parse, plan_grid

    _refuse_unless((*RESUMABLE, "sweep"), overrides)
    for key in {parse(text).key_or_group for text in overrides} & set(sweep.grid):
        raise InputError(f"{key}: it is swept; for other values start a new sweep")
    sweep.overrides += overrides
    return _run_sweep(sweep, plan_grid(sweep.grid, sweep.overrides, sweep.config_dir))


def _refuse_unless(allowed: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse keys that what is resumed cannot change any more."""
    from marl_pool.config import parse

    for text in overrides:
        key = parse(text).key_or_group
        if key.split(".")[0] not in allowed:
            raise InputError(
                f"{key}: a resumed run takes only {', '.join(allowed)}; "
                "for anything else start a new run"
            )


def _run_training(run: "Run", config: dict[str, Any]) -> int:
    try:
        with run.lock():
            from marl_pool.training.ppo import train

            train(run, config)
    except KeyboardInterrupt:
        return _stopped(run.path)
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
    "sweep": _sweep,
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
    if verb == "train" and "grid" in composed:
        raise InputError("grid: a grid is many runs; use `marl-pool sweep`")
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


def _flags_as_keys(
    section: str, flags: Mapping[str, str], arguments: Namespace
) -> list[str]:
    """The overrides that flags with a value are short for."""
    given = {key: getattr(arguments, key) for key in flags}
    return [
        f"{section}.{key}={_quoted(value)}"
        for key, value in given.items()
        if value is not None
    ]


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InputError(_install("ray", "rllib"))


def _quoted(value: str) -> str:
    """A flag's value in Hydra's syntax: a number as it is, else a quoted string."""
    try:
        float(value)
    except ValueError:
        return "'" + value.replace("'", r"\'") + "'"
    return value


def _stopped(path: Path) -> int:
    go_on = f"go on with: marl-pool resume {path}"
    print(f"marl-pool: stopped; {go_on}", file=sys.stderr)
    return 130


def _install(module: str, extra: str) -> str:
    return f'this needs {module}: pip install "marl-pool[{extra}]"'


def _refuse(message: str) -> int:
    print(f"marl-pool: {message}", file=sys.stderr)
    return 2


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)
