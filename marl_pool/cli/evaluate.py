"""Verbs for trained policies: evaluate, diagnose, render and report."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.cli.common import composed, open_run, print_paths, reading
from marl_pool.utils import names
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.evaluation.settings import RenderSettings
    from marl_pool.evaluation.video.side_by_side import SideBySideVideo
    from marl_pool.runs import Run

    Action = Callable[[Run, dict[str, Any], list[str]], list[Path]]

REPORT_KEYS = ("videos", "evaluate", "threads")
"""Keys of ``report``; with ``evaluate=true``, others are passed to ``evaluate``."""


def evaluate(arguments: Namespace, overrides: list[str]) -> int:
    """Measure runs or policies under perturbations, and compare several."""
    with reading(arguments, overrides):
        return _evaluate(arguments, overrides)


def _evaluate(arguments: Namespace, overrides: list[str]) -> int:
    settings = composed("evaluate", arguments, overrides)
    if settings is None:
        return 0
    runs = _readable(arguments)
    if len(arguments.run) < 2:
        return _act_on_one(arguments, settings, _evaluate_run)
    documents = _documents(arguments, settings, _evaluate_run)
    from marl_pool.evaluation.comparable import validate_comparable
    from marl_pool.evaluation.plots.heat_map import compare, has_occlusion

    if has_occlusion(settings["perturbations"]):
        try:
            validate_comparable(runs)
        except InputError as error:
            print(f"no heat map: {error}")
            return 0
        print_paths(compare(documents, arguments.out))
    return 0


def diagnose(arguments: Namespace, overrides: list[str]) -> int:
    """Measure what pooling heads keep of the signal, and compare several runs."""
    with reading(arguments, overrides):
        return _diagnose(arguments, overrides)


def _diagnose(arguments: Namespace, overrides: list[str]) -> int:
    settings = composed("diagnose", arguments, overrides)
    if settings is None:
        return 0
    runs = _readable(arguments)
    if len(arguments.run) < 2:
        return _act_on_one(arguments, settings, _diagnose_run)
    from marl_pool.evaluation.comparable import validate_comparable
    from marl_pool.evaluation.diagnosis.run import compare

    validate_comparable(runs)
    documents = _documents(arguments, settings, _diagnose_run)
    print_paths(compare(documents, arguments.out))
    return 0


def render(arguments: Namespace, overrides: list[str]) -> int:
    """Write a video of a run or a policy, or of several side by side."""
    with reading(arguments, overrides):
        return _render(arguments, overrides)


def _render(arguments: Namespace, overrides: list[str]) -> int:
    settings = composed("render", arguments, overrides)
    if settings is None:
        return 0
    if len(arguments.run) < 2:
        return _act_on_one(arguments, settings, _render_run)
    from marl_pool.evaluation.video.side_by_side import SideBySideVideo

    typed, perturbation, _ = _render_options(settings)
    video = SideBySideVideo(typed, perturbation, arguments.out)
    for path in arguments.run:
        _act_on(path, None, arguments, settings, partial(_add_column, video, path))
    print_paths([video.write()])
    return 0


def report(arguments: Namespace, overrides: list[str]) -> int:
    """Write a report page of runs."""
    with reading(arguments, overrides):
        return _report(arguments, overrides)


def _report(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import compose, parse

    def is_own(override: str) -> bool:
        return parse(override).key_or_group in REPORT_KEYS

    own = [override for override in overrides if is_own(override)]
    others = [override for override in overrides if not is_own(override)]
    settings = composed("report", arguments, own)
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
    runs = [open_run("report", path) for path in arguments.run or [None]]
    from marl_pool.evaluation.report import page
    from marl_pool.evaluation.report.runs import not_evaluated
    from marl_pool.evaluation.settings import ReportSettings

    page.new_page(arguments.out, runs)  # before the evaluations, which may take hours
    lacking = not_evaluated(runs)
    for run in lacking if settings["evaluate"] else []:
        print_paths(_act_on(str(run.path), None, arguments, how, _evaluate_run))
    plugins = arguments.plugin
    typed = ReportSettings(**settings)
    print_paths([page.report(runs, arguments.out, typed, plugins=plugins)])
    return 0


def _evaluate_run(
    run: "Run", settings: dict[str, Any], plugins: list[str]
) -> list[Path]:
    from marl_pool.evaluation.run import evaluate_run
    from marl_pool.evaluation.settings import EvaluateSettings
    from marl_pool.studies.attention_neuron.analyses import analyse_run

    typed = EvaluateSettings.from_config(settings)
    evaluated = evaluate_run(run, typed, env=settings["env"], plugins=plugins)
    return evaluated.paths + analyse_run(evaluated, typed)


def _diagnose_run(
    run: "Run", settings: dict[str, Any], plugins: list[str]
) -> list[Path]:
    from marl_pool.evaluation.diagnosis.run import diagnose_run
    from marl_pool.evaluation.settings import DiagnoseSettings

    own = dict(settings)
    env = own.pop("env")
    return diagnose_run(run, DiagnoseSettings(**own), env=env, plugins=plugins)


def _render_run(run: "Run", settings: dict[str, Any], plugins: list[str]) -> list[Path]:
    from marl_pool.evaluation.video.render import render_run

    typed, perturbation, env = _render_options(settings)
    path = render_run(run, typed, perturbation=perturbation, env=env, plugins=plugins)
    return [path]


def _add_column(
    video: "SideBySideVideo",
    path: str,
    run: "Run",
    settings: dict[str, Any],
    plugins: list[str],
) -> list[Path]:
    video.add(path, run, settings["env"], plugins)
    return []


def _render_options(
    settings: dict[str, Any],
) -> "tuple[RenderSettings, dict[str, Any] | None, dict[str, Any] | None]":
    """Split a configuration into the video's settings, perturbation and env."""
    from marl_pool.evaluation.settings import RenderSettings

    own = dict(settings)
    env, perturbation = own.pop("env"), own.pop("perturbation")
    return RenderSettings(**own), perturbation, env


def _act_on_one(
    arguments: Namespace, settings: dict[str, Any], action: "Action"
) -> int:
    path = next(iter(arguments.run), None)
    print_paths(_act_on(path, arguments.out, arguments, settings, action))
    return 0


def _readable(arguments: Namespace) -> "list[Run]":
    """Open all runs before any is measured, which may take hours.

    Standalone policies are left out. A single run is opened by `_act_on`.
    """
    from marl_pool.evaluation.standalone import find_standalone

    if len(arguments.run) < 2:
        return []
    if arguments.out is not None and Path(arguments.out).exists():
        raise InputError(f"{arguments.out} exists; choose another --out")
    return [
        open_run(arguments.verb, path)
        for path in arguments.run
        if find_standalone(path, None) is None
    ]


def _documents(
    arguments: Namespace, settings: dict[str, Any], action: "Action"
) -> list[Path]:
    """Act on each of several runs, and return the JSON files that it wrote."""
    documents = []
    for path in arguments.run:
        written = _act_on(path, None, arguments, settings, action)
        print_paths(written)
        documents += [file for file in written if file.suffix == ".json"]
    return documents


def _act_on(
    path: str | None,
    out: str | None,
    arguments: Namespace,
    settings: dict[str, Any],
    action: "Action",
) -> list[Path]:
    """Act on a run, or on a standalone policy as a new run.

    Args:
        path: folder of either; None if ``pretrained`` names a policy.
        out: folder for the results of a standalone policy.
        arguments: parsed flags.
        settings: configuration of the verb. If it changes the env, ``action`` gets the
            env's complete options.
        action: takes the run, the settings and the plug-ins; returns the files written.
    """
    from marl_pool.evaluation.standalone import find_standalone

    verb, change = arguments.verb, settings["env"]
    policy = find_standalone(path, settings["pretrained"])
    named = change is not None and "name" in change
    # A suite may choose an environment too: only names that the user typed are allowed.
    typed = names.texts_in(change) & names.allowed()
    plugins = [*arguments.plugin, *sorted(typed)]
    if policy is None:
        run = open_run(verb, path)
        if out is not None:
            raise InputError(f"--out: the results of {path} are written to that run")
        env = _env(change, run.env, run.path)
        return action(run, {**settings, "env": env}, plugins)
    if not named and policy.env is None:
        raise InputError(f"{policy.source} names no environment: expected env=NAME")
    trained = _env(policy.env, None, policy.source)
    env = _env(change, trained, policy.source) or trained
    assert env is not None
    with policy.new_run(trained or env, out, verb) as run:
        changed = None if env == run.env else env
        return action(run, {**settings, "env": changed}, plugins)


def _env(
    change: Mapping[str, Any] | None, base: Mapping[str, Any] | None, source: object
) -> dict[str, Any] | None:
    """Return an environment's complete options, None without a change."""
    from marl_pool.config.checks import check_change

    if change is None:
        return None
    with names.trust(names.allowed(), source):
        return check_change("env", change, base)
