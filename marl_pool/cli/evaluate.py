"""Verbs for trained policies: evaluate, render, play and report."""

from argparse import Namespace
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from marl_pool.cli.common import (
    composed,
    naming_file,
    open_run,
    plugin_flags,
    print_next,
    print_paths,
)
from marl_pool.options import names
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import print_line, quoted

if TYPE_CHECKING:
    from marl_pool.evaluation.settings import ReportSettings
    from marl_pool.evaluation.target import EvaluationTarget
    from marl_pool.runs.run import Run

Act = Callable[..., list[Path]]
"""Takes a run, settings, and the options of `Reader.opened`; returns files written."""


class Reader:
    """Reader of runs and standalone policies for one verb.

    Args:
        verb: the verb that composed and checked the sections and settings.
        arguments: parsed flags.
        env: the section ``env``; None without a change.
        perturbation: the section ``perturbation``, for verbs that have one.
        **settings: the verb's other keys.
    """

    def __init__(
        self,
        verb: str,
        arguments: Namespace,
        env: Mapping[str, Any] | None,
        perturbation: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from marl_pool.config import VERBS

        self.verb, self.arguments, self.change = verb, arguments, env
        self.perturbation = perturbation
        self.settings = VERBS[verb].settings(**settings)

    @contextmanager
    def opened(
        self, path: str | None, out: str | None = None
    ) -> "Iterator[tuple[Run, dict[str, Any]]]":
        """Open a run, or create one that holds the results of a standalone policy.

        Args:
            path: folder of either; None if ``pretrained`` names a policy.
            out: new folder for the results; by default they are in the run, or in a new
                run of a standalone policy. For verbs other than ``render``, ``out`` is
                that new run, which can be reported.

        Yields:
            The run, and a dict of options: ``env``, all options of a changed
            environment or None, and ``plugins``, names that the run may use.
        """
        from marl_pool.evaluation.standalone import find_standalone, new_results
        from marl_pool.runs.run import CONFIG

        policy = find_standalone(path, self.settings.pretrained)
        # A suite may choose an environment too: allow only names that the user typed.
        typed = names.texts_in(self.change) & names.allowed()
        plugins = [*self.arguments.plugin, *sorted(typed)]
        # A run, which holds its own results.
        if policy is None:
            run = open_run(self.verb, path)
            with naming_file(run.path / CONFIG):
                trained = _env(run.env, None, run.path, run.config)
            env = _env(self.change, trained, run.path)
            with ExitStack() as stack:
                if out is not None:
                    run.results = stack.enter_context(new_results(out))
                yield run, {"env": env, "plugins": plugins}
            return
        # A policy without a run: its environment is saved with it, or typed.
        if policy.env is None and "name" not in (self.change or {}):
            raise InputError(f"{policy.source} names no environment: expected env=NAME")
        trained = _env(policy.env, None, policy.source)
        env = _env(self.change, trained, policy.source) or trained
        assert env is not None
        with ExitStack() as stack:
            results, place = None, out
            if self.verb == "play" or (self.verb == "render" and out is not None):
                # The run is needed for as long as the policy is read.
                scratch = stack.enter_context(TemporaryDirectory())
                place = str(Path(scratch, policy.name))
            if place != out and out is not None:
                results = stack.enter_context(new_results(out))
            # The new run records the environment of training; a change is passed on.
            new = policy.new_run(trained or env, place, self.verb)
            run = stack.enter_context(new)
            run.results = results
            yield run, {"env": None if env == run.env else env, "plugins": plugins}

    def process(self, act: Act, path: str | None, out: str | None = None) -> list[Path]:
        """Act on one run or policy, and return the files written."""
        with self.opened(path, out) as (run, options):
            return act(run, self.settings, **options)

    def process_single(self, act: Act, *next_verbs: str) -> int:
        """Act on the command's only run or policy; suggest commands with next verbs."""
        from marl_pool.runs.run import CONFIG

        path = next(iter(self.arguments.run), None)
        paths = self.process(act, path, self.arguments.out)
        print_paths(paths)
        is_run = path is not None and Path(path, CONFIG).is_file()
        run = quoted(path if is_run else paths[0].parent.parent)
        flags = plugin_flags(self.arguments.plugin)
        # A report does not find results outside their run.
        is_elsewhere = self.arguments.out is not None and is_run
        verbs = [verb for verb in next_verbs if verb != "report" or not is_elsewhere]
        print_next(*(f"marl-pool {verb} {run}{flags}" for verb in verbs))
        return 0

    def process_all(self, act: Act) -> list[Path]:
        """Act on each of several runs, and return the JSON files written."""
        documents = []
        for path in self.arguments.run:
            paths = self.process(act, path)
            print_paths(paths)
            documents += [file for file in paths if file.suffix == ".json"]
        return documents

    def open_all(self) -> "list[Run]":
        """Open all runs but standalone policies, before work that may take hours."""
        from marl_pool.evaluation.standalone import find_standalone, results_folder

        if self.arguments.out is not None:
            results_folder("", self.arguments.out)
        paths = self.arguments.run
        return [open_run(self.verb, p) for p in paths if not find_standalone(p, None)]


def evaluate(arguments: Namespace, overrides: list[str]) -> int:
    """Measure runs or policies under perturbations."""
    config = composed(arguments, overrides)
    if config is None:
        return 0
    reader = Reader("evaluate", arguments, **config)
    if len(arguments.run) < 2:
        return reader.process_single(_evaluate_run, "render", "report")
    if arguments.out is not None:
        raise InputError("--out: expected a single policy, got several")
    reader.open_all()
    reader.process_all(_evaluate_run)
    return 0


def _evaluate_run(run: "Run", settings: Any, **options: Any) -> list[Path]:
    from marl_pool.evaluation.analyses import analyse_run
    from marl_pool.evaluation.evaluate import evaluate_run

    evaluated = evaluate_run(run, settings, **options)
    return evaluated.paths + analyse_run(evaluated, settings)


def render(arguments: Namespace, overrides: list[str]) -> int:
    """Write a video of a run or a policy, or of several side by side."""
    config = composed(arguments, overrides)
    if config is None:
        return 0
    reader = Reader("render", arguments, **config)
    perturbation = reader.perturbation

    def render_one(run: "Run", settings: Any, **options: Any) -> list[Path]:
        from marl_pool.evaluation.video.render import render_run

        return [render_run(run, settings, perturbation=perturbation, **options)]

    if len(arguments.run) < 2:
        return reader.process_single(render_one)
    from marl_pool.evaluation.standalone import new_results
    from marl_pool.evaluation.video import render as video
    from marl_pool.runs.run import VIDEOS

    targets: dict[str, EvaluationTarget] = {}
    with new_results(arguments.out, VIDEOS) as folder:
        for path in arguments.run:
            with reader.opened(path) as (run, options):
                name = _unused_name(video.shown_name(run), targets)
                targets[name] = video.load_target(run, reader.settings, **options)
        file = video.render_side_by_side(folder, targets, reader.settings, perturbation)
    print_paths([file])
    return 0


def play(arguments: Namespace, overrides: list[str]) -> int:
    """Serve a live page of runs or policies, or export one.

    Raises:
        StoppedError: an environment exceeded ``env_timeout``.
    """
    if arguments.export is None:
        import websockets  # noqa: F401 - fails before anything is loaded
    port = arguments.port
    # Python refuses to convert thousands of digits.
    is_short = port.isascii() and port.isdigit() and len(port) < 6
    if not (is_short and int(port) < 1 << 16):
        raise InputError(f"--port: expected a number from 0 to 65535, got {port!r}")
    config = composed(arguments, overrides)
    if config is None:
        return 0
    reader = Reader("play", arguments, **config)
    settings = reader.settings
    # A device would only add its latency to single environments.
    if settings.device != "cpu":
        raise InputError(f"device: expected cpu, got {settings.device}")
    if settings.stochastic and arguments.export is not None:
        raise InputError(
            "stochastic: expected false with --export, since exported pages take the "
            "most likely action, got true"
        )
    targets = _load(reader)
    from marl_pool.evaluation.computing import computing

    if arguments.export is not None:
        from marl_pool.play.export import export

        with computing(settings.threads, env_timeout=settings.env_timeout):
            page = export(targets, Path(arguments.export), settings.seed)
        print_paths([page])
        return 0
    from marl_pool.play import server
    from marl_pool.play.session import Session

    with computing(settings.threads, settings.kernels, settings.env_timeout):
        server.play(
            lambda: Session(targets, settings.seed, settings.stochastic),
            port=int(port),
            browser=not arguments.no_browser,
        )
    return 0


def _load(reader: Reader) -> "dict[str, EvaluationTarget]":
    """Load all policies, by the names of their runs.

    Raises:
        InputError: their environments differ.
    """
    from marl_pool.evaluation.load import target_from_run
    from marl_pool.evaluation.target import EvaluationTarget

    targets: dict[str, EvaluationTarget] = {}
    for path in reader.arguments.run or [None]:
        with reader.opened(path) as (run, options):
            target = target_from_run(run, reader.settings, **options)
        targets[_unused_name(target.source, targets)] = target
    first, *other_targets = targets.items()
    for name, target in other_targets:
        for key in {**first[1].env, **target.env}:
            first_value, value = first[1].env.get(key), target.env.get(key)
            if first_value != value:
                raise InputError(
                    f"play: expected policies of one environment, got env.{key} = "
                    f"{first_value} in {first[0]} and {value} in {name}"
                )
    return targets


def _unused_name(name: str, labels: Container[str]) -> str:
    """Return the name, or the first of ``name (2)``, ``name (3)`` … not in use."""
    numbered = (f"{name} ({number})" for number in count(2))
    return next(label for label in chain([name], numbered) if label not in labels)


def report(arguments: Namespace, overrides: list[str]) -> int:
    """Write a report page of runs."""
    from marl_pool.config import parse
    from marl_pool.evaluation.settings import ReportSettings

    # Other keys belong to `evaluate`, which runs with evaluate=true.
    keys = [field.name for field in fields(ReportSettings)]
    page_overrides = [text for text in overrides if parse(text).key in keys]
    evaluation_overrides = [text for text in overrides if text not in page_overrides]
    # Compose the settings of the page.
    config = composed(arguments, page_overrides)
    if config is None:
        return 0
    settings = ReportSettings(**config)
    if evaluation_overrides and not settings.evaluate:
        raise InputError(
            f"{parse(evaluation_overrides[0]).key}: expected one of "
            f"{', '.join(keys)}, or evaluate=true and a key of `marl-pool evaluate`"
        )
    runs = [open_run("report", path) for path in arguments.run or [None]]
    from marl_pool.evaluation.report import page
    from marl_pool.evaluation.report.evaluated import read_runs

    page.new_page(arguments.out, runs)  # before the evaluations, which may take hours
    if settings.evaluate:
        _evaluate_missing(arguments, runs, evaluation_overrides, settings)
    plugins = arguments.plugin
    print_paths([page.report(runs, arguments.out, settings, plugins=plugins)])
    is_incomplete = False
    for reported in read_runs(runs):
        older = reported.superseded and f"its evaluation is {reported.superseded}"
        if warning := reported.evaluation_missing or older:
            print_line(f"{reported.run.path}: {warning}")
        is_incomplete |= reported.evaluation is None
    if is_incomplete and not settings.evaluate:
        paths = " ".join(quoted(run.path) for run in runs)
        flags = plugin_flags(arguments.plugin)
        print_next(f"marl-pool report {paths} evaluate=true{flags}")
    return 0


def _evaluate_missing(
    arguments: Namespace,
    runs: "list[Run]",
    overrides: list[str],
    page: "ReportSettings",
) -> None:
    """Evaluate the runs that lack an evaluation as the others were evaluated.

    Raises:
        InputError: ``overrides`` ask for evaluations that cannot be compared.
    """
    from marl_pool.config import compose, parse
    from marl_pool.evaluation.report.evaluated import read_runs, usual_settings
    from marl_pool.options.overrides import Override, overrides_of

    reported_runs = read_runs(runs)
    usual = usual_settings(reported_runs)
    # A suite that was typed decides which rows there are.
    if any(parse(text).key == "suite" for text in overrides):
        for key in ("stochastic", "worst_of", "perturbations", "transfer"):
            usual.pop(key, None)
    limit = page.env_timeout
    page_settings = {"threads": page.threads, "env_timeout": limit}
    typed: list[str | Override] = [
        *overrides_of(usual),
        *overrides,
        *overrides_of(page_settings),
    ]
    # Compose the settings of the evaluations before any of them starts.
    config = compose("evaluate", typed, arguments.config_dir)
    missing_runs = [r.run for r in reported_runs if r.evaluation is None]
    for key in ("episodes", "seed", "checkpoint") if missing_runs else ():
        if key in usual and config[key] != usual[key]:
            raise InputError(
                f"{key}: expected {usual[key]}, with which the other runs were "
                f"evaluated, got {config[key]}"
            )
    for run in missing_runs:
        reader = Reader("evaluate", arguments, **config)
        print_paths(reader.process(_evaluate_run, str(run.path)))


def _env(
    change: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    source: object,
    config: object = None,
) -> dict[str, Any] | None:
    """Return all options of a changed environment, or None without a change."""
    from marl_pool.config.checks import check_change

    if change is None:
        return None
    with names.trust(names.allowed(), source, config=config):
        return check_change("env", change, base)
