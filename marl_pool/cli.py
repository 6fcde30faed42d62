"""The ``marl-pool`` command: parse, compose, check, call.

Whatever is heavy loads inside the verb that needs it, so that help and refusals come
at once.
"""

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool import names
from marl_pool.arguments import (
    KINDS,
    PRETRAINED,
    PUBLISHED,
    RESOURCES,
    SWEEP_FLAGS,
    WEIGHTS,
    WORKERS,
    parse,
    print_help,
)
from marl_pool.errors import InputError, StoppedError

if TYPE_CHECKING:
    from marl_pool.config.grid import Plan
    from marl_pool.runs import Run
    from marl_pool.sweeps import Sweep

    Act = Callable[[Run, dict[str, Any], list[str]], list[Path]]

EXTRAS = {
    "ray": "rllib",
    "tensorboardX": "rllib",
    "cma": "evolve",
    "matplotlib": "plots",
    "cv2": "plots",
    "ale_py": "atari",
    "Box2D": "box2d",
    "pygame": "box2d",
    "pybullet": "bullet",
    "mujoco": "mujoco",
    "imageio": "mujoco",
}
"""Which extra installs a module that the base installation lacks."""
REPORT_KEYS = ("videos", "evaluate", "threads")
"""Keys of ``report`` itself; with ``evaluate=true`` others go to ``evaluate``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 if trials of a sweep failed, 2 for bad input, 130 if stopped.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    try:
        status = _main(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a closed pipe can be told from a fault
        return status
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
    except BrokenPipeError:
        # Whoever read the output has enough of it; Python must not try to flush more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    return _new_run(arguments, overrides, RESOURCES)


def _evolve(arguments: Namespace, overrides: list[str]) -> int:
    return _new_run(arguments, overrides, WORKERS)


def _clone(arguments: Namespace, overrides: list[str]) -> int:
    return _new_run(arguments, overrides, {})


def _fit(arguments: Namespace, overrides: list[str]) -> int:
    if not arguments.dry_run:
        return _new_run(arguments, overrides, {})
    config = _composed("fit", arguments, overrides)
    if config is not None:
        import tempfile

        from marl_pool.training.supervised.fit import price

        with tempfile.TemporaryDirectory() as folder:
            print(price(config, Path(folder)))
    return 0


def _new_run(
    arguments: Namespace, overrides: list[str], flags: Mapping[str, str]
) -> int:
    overrides += _flags_as_keys("resources", flags, arguments)
    verb = arguments.verb
    config = _composed(verb, arguments, overrides)
    if config is None:
        return 0
    _require_ray_for(verb, config)
    from marl_pool.runs import Run, default_path

    run = Run.create(arguments.run_dir or default_path(config), config, verb)
    try:
        return _run_training(run, config)
    except StoppedError:
        raise
    except Exception:
        run.discard_if_unused()
        raise


def _sweep(arguments: Namespace, overrides: list[str]) -> int:
    overrides += _flags_as_keys("sweep", SWEEP_FLAGS, arguments)
    from marl_pool.config import STUDIES, check, commented, compose_only, plan_sweep
    from marl_pool.sweeps import Sweep, default_path

    verb = arguments.trained_by
    plan = plan_sweep(overrides, arguments.config_dir, verb)
    if arguments.cfg:
        study = STUDIES[verb]
        composed, chosen = compose_only(study, plan.overrides, arguments.config_dir)
        checked = check(study, {**composed, "grid": plan.grid})
        print(commented(study, checked, chosen, arguments.config_dir), end="")
        return 0
    first = plan.trials[0].config
    label = (first.get("env") or first["task"])["name"].rpartition(":")[2]
    path = arguments.sweep_dir or default_path(label)
    if Sweep.is_at(path):
        raise InputError(
            f"{path} exists; choose another --sweep-dir or `marl-pool resume {path}`"
        )
    sweep = Sweep(path, plan.grid, plan.overrides, arguments.config_dir, verb)
    return _run_sweep(sweep, plan, arguments.dry_run)


def _run_sweep(sweep: "Sweep", plan: "Plan", dry_run: bool = False) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        # All trials share what one of them has made; a dry run leaves nothing.
        data = scratch if dry_run else str((sweep.path / "data").absolute())
        for trial in plan.trials:
            if "data_dir" in trial.config and trial.config["data_dir"] is None:
                trial.config["data_dir"] = data
        return _run_trials(sweep, plan, dry_run)


def _run_trials(sweep: "Sweep", plan: "Plan", dry_run: bool) -> int:
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
    run = _open_run(arguments.verb, arguments.run)
    from marl_pool.training.verbs import WORKS

    if run.verb not in WORKS:
        raise InputError(f"{run.path}: made by {run.verb!r}, which cannot be resumed")
    work = WORKS[run.verb]
    _refuse_unless(work.controls, overrides)
    try:
        config = check(run.verb, assign(run.config, overrides))
    except InputError as error:
        raise InputError(f"{run.path}: {error}") from error
    done, wanted = work.saved(run), work.total(config)
    if done >= wanted:
        print(f"{run.path}: {done:,} of {wanted:,} {work.unit} are done; nothing to do")
        return 0
    _require_ray_for(run.verb, config)
    return _run_training(run, config)


def _resume_sweep(sweep: "Sweep", overrides: list[str]) -> int:
    from marl_pool.config import parse, plan_grid
    from marl_pool.training.verbs import WORKS

    _refuse_unless((*WORKS[sweep.verb].controls, "sweep"), overrides)
    for key in {parse(text).key_or_group for text in overrides} & set(sweep.grid):
        raise InputError(f"{key}: it is swept; for other values start a new sweep")
    sweep.overrides += overrides
    plan = plan_grid(sweep.grid, sweep.overrides, sweep.config_dir, sweep.verb)
    return _run_sweep(sweep, plan)


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
    from marl_pool.training.verbs import WORKS

    work = WORKS[run.verb]
    try:
        with run.lock():
            work.load()(run, config)
    except KeyboardInterrupt:
        return _stopped(run.path)
    finally:
        run.close()
    results = [run.path / work.result] if work.result else []
    written = (run.metrics_path, run.policy_dir, *results)
    _print_paths([run.path, *filter(Path.exists, written)])
    return 0


def _evaluate(arguments: Namespace, overrides: list[str]) -> int:
    settings = _composed("evaluate", arguments, overrides)
    if settings is None:
        return 0

    runs = _readable(arguments)
    if len(arguments.run) < 2:
        return _act_on_one(arguments, settings, _evaluate_run)
    documents = _documents(arguments, settings, _evaluate_run)
    from marl_pool.evaluation.comparable import require_comparable
    from marl_pool.evaluation.heat_map import compare, is_shown

    if is_shown(settings["perturbations"]):
        try:
            require_comparable(runs)
        except InputError as error:
            print(f"no heat map: {error}")
            return 0
        _print_paths(compare(documents, arguments.out))
    return 0


def _diagnose(arguments: Namespace, overrides: list[str]) -> int:
    settings = _composed("diagnose", arguments, overrides)
    if settings is None:
        return 0

    def act(run: "Run", *given: Any) -> list[Path]:
        from marl_pool.evaluation.diagnose import diagnose_run

        settings, plugins = given
        return diagnose_run(run, settings, plugins=plugins)

    runs = _readable(arguments)
    if len(arguments.run) < 2:
        return _act_on_one(arguments, settings, act)
    from marl_pool.evaluation.comparable import require_comparable
    from marl_pool.evaluation.diagnose import compare

    require_comparable(runs)
    documents = _documents(arguments, settings, act)
    _print_paths(compare(documents, arguments.out))
    return 0


def _act_on_one(arguments: Namespace, settings: dict[str, Any], act: "Act") -> int:
    path = next(iter(arguments.run), None)
    _print_paths(_act_on(path, arguments.out, arguments, settings, act))
    return 0


def _readable(arguments: Namespace) -> "list[Run]":
    """Open what was named, before any of it is measured, which may take hours."""
    from marl_pool.evaluation.opening import find_bare

    if len(arguments.run) < 2:
        return []  # the one is opened soon enough
    if arguments.out is not None and Path(arguments.out).exists():
        raise InputError(f"{arguments.out} exists; choose another --out")
    bare = [find_bare(path, None) for path in arguments.run]
    return [
        _open_run(arguments.verb, path)
        for path, policy in zip(arguments.run, bare, strict=True)
        if policy is None
    ]


def _documents(
    arguments: Namespace, settings: dict[str, Any], act: "Act"
) -> list[Path]:
    """Act on each of several runs; return the JSON files among what was written."""
    documents = []
    for path in arguments.run:
        written = _act_on(path, None, arguments, settings, act)
        _print_paths(written)
        documents += [file for file in written if file.suffix == ".json"]
    return documents


def _report(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import compose, parse

    def is_own(override: str) -> bool:
        return parse(override).key_or_group in REPORT_KEYS

    own = [override for override in overrides if is_own(override)]
    others = [override for override in overrides if not is_own(override)]
    settings = _composed("report", arguments, own)
    if settings is None:
        return 0
    if others and not settings["evaluate"]:
        raise InputError(
            f"{parse(others[0]).key_or_group}: expected one of "
            f"{', '.join(REPORT_KEYS)}, or evaluate=true and a key of "
            "`marl-pool evaluate`"
        )
    threads = f"threads={settings['threads']}"
    how = compose("evaluate", [*others, threads], arguments.config_dir)
    runs = [_open_run("report", path) for path in arguments.run or [None]]
    from marl_pool.evaluation.report.page import new_page, report
    from marl_pool.evaluation.report.sources import not_evaluated

    new_page(arguments.out, runs)  # before the evaluations, which may take hours
    lacking = not_evaluated(runs)
    for run in lacking if settings["evaluate"] else []:
        _print_paths(_act_on(str(run.path), None, arguments, how, _evaluate_run))
    plugins = arguments.plugin
    _print_paths([report(runs, arguments.out, settings, plugins=plugins)])
    return 0


def _evaluate_run(
    run: "Run", settings: dict[str, Any], plugins: list[str]
) -> list[Path]:
    from marl_pool.evaluation.robustness import evaluate_run

    return evaluate_run(run, settings, plugins=plugins)


def _render(arguments: Namespace, overrides: list[str]) -> int:
    settings = _composed("render", arguments, overrides)
    if settings is None:
        return 0

    if len(arguments.run) < 2:

        def act(run: "Run", *given: Any) -> list[Path]:
            from marl_pool.evaluation.video import render_run

            settings, plugins = given
            return [render_run(run, settings, plugins=plugins)]

        return _act_on_one(arguments, settings, act)

    from marl_pool.evaluation.side_by_side import SideBySide

    film = SideBySide(settings, arguments.out)
    for path in arguments.run:
        _act_on(path, None, arguments, settings, partial(film.add, path))
    _print_paths([film.write()])
    return 0


def _act_on(
    path: str | None,
    out: str | None,
    arguments: Namespace,
    settings: dict[str, Any],
    act: "Act",
) -> list[Path]:
    """Evaluate or render a run, or a policy without one.

    Args:
        path: of either; None where ``pretrained`` names a policy.
        out: folder for the results of a policy without a run.
        arguments: the flags.
        settings: of the verb; the env in them becomes complete, if there is one.
        act: takes the run, the settings and the plug-ins; returns what it wrote.
    """
    from marl_pool.evaluation.opening import find_bare

    verb, change = arguments.verb, settings["env"]
    bare = find_bare(path, settings["pretrained"])
    own = [change["name"]] if change and "name" in change else []
    plugins = [*arguments.plugin, *own]
    if bare is None:
        run = _open_run(verb, path)
        if out is not None:
            raise InputError(f"--out: the results of {path} are written to that run")
        env = _env(change, run.config["env"], run.path, plugins)
        return act(run, {**settings, "env": env}, plugins)
    if not own and bare.env is None:
        raise InputError(
            f"{bare.source} does not say in what world it acts: expected env=NAME"
        )
    trained = _env(bare.env, None, bare.source, plugins)
    env = _env(change, trained, bare.source, plugins) or trained
    assert env is not None
    with bare.as_run(trained or env, out, verb) as run:
        changed = None if env == run.config["env"] else env
        return act(run, {**settings, "env": changed}, plugins)


def _env(
    change: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    source: object,
    plugins: Sequence[str],
) -> dict[str, Any] | None:
    """A world's complete options; None where nothing is to change."""
    from marl_pool.config.checks import check_change
    from marl_pool.envs import ENVS

    if change is None:
        return None
    name = change.get("name") or (base or {})["name"]
    names.check_trusted(name, ENVS, "env", plugins, source)
    return check_change("env", change, base)


def _import_weights(arguments: Namespace, overrides: list[str]) -> int:
    if overrides:
        raise InputError(f"import-weights takes no keys, got {overrides[0]!r}")
    for kind, given, choices in (
        ("source", arguments.source, WEIGHTS),
        ("agent", arguments.agent, PUBLISHED),
    ):
        if given not in choices:
            raise names.unknown(kind, given, choices)
    from marl_pool.policies.published import import_weights

    _print_paths([import_weights(arguments.file, arguments.agent, arguments.out)])
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
        if kind == PRETRAINED:
            _list_pretrained()
            continue
        for name, target in sorted(registry(kind).items()):
            print(f"  {name:<16} {summary(target)}")
    return 0


def _list_pretrained() -> None:
    from marl_pool.pretrained import pretrained_names, pretrained_summary

    for name in pretrained_names():
        print(f"  {name:<16} {pretrained_summary(name)}")


VERBS = {
    "train": _train,
    "sweep": _sweep,
    "evolve": _evolve,
    "clone": _clone,
    "fit": _fit,
    "resume": _resume,
    "evaluate": _evaluate,
    "diagnose": _diagnose,
    "render": _render,
    "report": _report,
    "import-weights": _import_weights,
    "list": _list,
}


def _composed(
    verb: str, arguments: Namespace, overrides: list[str]
) -> dict[str, Any] | None:
    """Compose and check; with ``--cfg`` print the result and return None."""
    from marl_pool.config import STUDIES, check, commented, compose_only
    from marl_pool.config.sections import typed

    composed, chosen = compose_only(verb, overrides, arguments.config_dir)
    if verb in STUDIES and "grid" in composed:
        command = f"marl-pool {typed(STUDIES[verb])}"
        raise InputError(f"grid: a grid is many runs; use `{command}`")
    checked = check(verb, composed)
    if not arguments.cfg:
        return checked
    print(commented(verb, checked, chosen, arguments.config_dir), end="")
    return None


def _open_run(verb: str, path: str | None) -> "Run":
    from marl_pool.runs import Run

    if path is None:
        raise InputError(f"{verb}: expected the folder of a run, got none")
    run = Run.open(path)
    if run.verb == "fit" and verb != "resume":
        from marl_pool.training.verbs import WORKS

        raise InputError(
            f"{verb}: expected a run that has a policy, got {path}, made by fit: what "
            f"it came to is in {WORKS[run.verb].result}"
        )
    return run


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


def _require_ray_for(verb: str, config: Mapping[str, Any]) -> None:
    if verb == "train" or config.get("resources", {}).get("num_workers"):
        _require_ray()


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
