"""Verbs for trained policies: evaluate, diagnose, render and report."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from marl_pool.api.train import as_overrides
from marl_pool.cli.common import (
    composed,
    flags_as_keys,
    naming_file,
    open_run,
    plugin_flags,
    print_next,
    print_paths,
)
from marl_pool.utils import names
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import quoted

if TYPE_CHECKING:
    from marl_pool.evaluation.loading import EvaluationTarget
    from marl_pool.evaluation.settings import RenderSettings, ReportSettings
    from marl_pool.runs import Run


class Reader:
    """A verb that reads runs and standalone policies.

    Args:
        arguments: parsed flags.
        env: the composed section ``env``; None without a change.
        perturbation: the section ``perturbation``, of verbs that have one.
        **settings: the verb's other keys.
    """

    verb: ClassVar[str]

    def __init__(
        self,
        arguments: Namespace,
        env: Mapping[str, Any] | None,
        perturbation: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from marl_pool.config import VERBS

        self.arguments, self.change, self.perturbation = arguments, env, perturbation
        self.settings = VERBS[self.verb].settings(**settings)

    @contextmanager
    def opened(
        self, path: str | None, out: str | None = None
    ) -> "Iterator[tuple[Run, dict[str, Any]]]":
        """Open a run, or make one that holds the results of a standalone policy.

        Args:
            path: folder of either; None if ``pretrained`` names a policy.
            out: folder for the results of a standalone policy.

        Yields:
            The run, ``env``, the changed environment's complete options or None, and
            ``plugins``, the names that the run may use.
        """
        from marl_pool.evaluation.standalone import find_standalone
        from marl_pool.runs import CONFIG

        policy = find_standalone(path, self.settings.pretrained)
        # A suite may choose an environment too: allow only names that the user typed.
        typed = names.texts_in(self.change) & names.allowed()
        plugins = [*self.arguments.plugin, *sorted(typed)]
        # A run, which holds its own results.
        if policy is None:
            run = open_run(self.verb, path)
            if out is not None:
                raise InputError(
                    "--out: expected none for a run, whose results are written to "
                    f"its folder {path}, got {out}"
                )
            with naming_file(run.path / CONFIG):
                trained = _env(run.env, None, run.path, run.config)
            env = _env(self.change, trained, run.path)
            yield run, {"env": env, "plugins": plugins}
            return
        # A policy without a run: its environment is saved with it, or typed.
        if policy.env is None and "name" not in (self.change or {}):
            raise InputError(f"{policy.source} names no environment: expected env=NAME")
        trained = _env(policy.env, None, policy.source)
        env = _env(self.change, trained, policy.source) or trained
        assert env is not None
        # The new run states the trained environment; a change is passed on as one.
        with policy.new_run(trained or env, out, self.verb) as run:
            yield run, {"env": None if env == run.env else env, "plugins": plugins}


class ResultsReader(Reader, ABC):
    """A verb that writes results of runs and standalone policies."""

    @classmethod
    def main(cls, arguments: Namespace, overrides: list[str]) -> int:
        """Compose the settings, and act on one run or on several."""
        overrides += flags_as_keys(arguments)
        config = composed(cls.verb, arguments, overrides)
        if config is None:
            return 0
        reader = cls(arguments, **config)
        if len(arguments.run) < 2:
            path = next(iter(arguments.run), None)
            written = reader.on_one(path, arguments.out)
            print_paths(written)
            flags = plugin_flags(arguments.plugin)
            commands = cls.next_commands(written[0].parent.parent)
            print_next(*(f"{command}{flags}" for command in commands))
        else:
            reader.on_several()
        return 0

    def on_one(self, path: str | None, out: str | None = None) -> list[Path]:
        """Act on one run or policy, and return the files written."""
        with self.opened(path, out) as (run, options):
            return self.act(run, **options)

    @staticmethod
    def next_commands(run: Path) -> list[str]:
        """Return commands that may follow, given the folder with the results."""
        return []

    @abstractmethod
    def act(self, run: "Run", **options: Any) -> list[Path]:
        """Do the work on one run, with the options of `opened`."""

    @abstractmethod
    def on_several(self) -> None:
        """Act on several runs, and compare them."""

    def open_all(self) -> "list[Run]":
        """Open all runs but standalone policies; the work on them may take hours."""
        from marl_pool.evaluation.standalone import find_standalone, results_folder

        if self.arguments.out is not None:
            results_folder("", self.arguments.out)
        paths = self.arguments.run
        return [open_run(self.verb, p) for p in paths if not find_standalone(p, None)]

    def write_documents(self) -> list[Path]:
        """Act on each of several runs, and return the JSON files written."""
        documents = []
        for path in self.arguments.run:
            written = self.on_one(path)
            print_paths(written)
            documents += [file for file in written if file.suffix == ".json"]
        return documents


class Evaluate(ResultsReader):
    """Measure runs or policies under perturbations."""

    verb = "evaluate"

    @override
    def act(self, run: "Run", **options: Any) -> list[Path]:
        from marl_pool.evaluation.run import evaluate_run
        from marl_pool.studies.attention_neuron.analyses import analyse_run

        evaluated = evaluate_run(run, self.settings, **options)
        return evaluated.paths + analyse_run(evaluated, self.settings)

    @staticmethod
    @override
    def next_commands(run: Path) -> list[str]:
        path = quoted(run)
        return [f"marl-pool render {path}", f"marl-pool report {path}"]

    @override
    def on_several(self) -> None:
        if self.arguments.out is not None:
            raise InputError("--out: expected a single policy, got several")
        self.open_all()
        self.write_documents()


class Diagnose(ResultsReader):
    """Measure how much signal pooling heads keep, and compare several runs."""

    verb = "diagnose"

    @override
    def act(self, run: "Run", **options: Any) -> list[Path]:
        from marl_pool.evaluation.diagnosis.run import diagnose_run

        return diagnose_run(run, self.settings, **options)

    @override
    def on_several(self) -> None:
        runs = self.open_all()
        from marl_pool.evaluation.comparable import validate_comparable
        from marl_pool.evaluation.diagnosis.run import compare

        validate_comparable(runs)
        print_paths(compare(self.write_documents(), self.arguments.out))


class Render(ResultsReader):
    """Write a video of a run or a policy, or of several side by side."""

    verb = "render"
    settings: "RenderSettings"

    @override
    def act(self, run: "Run", **options: Any) -> list[Path]:
        from marl_pool.evaluation.video.render import render_run

        options |= {"perturbation": self.perturbation}
        return [render_run(run, self.settings, **options)]

    @override
    def on_several(self) -> None:
        from marl_pool.evaluation.standalone import results_folder
        from marl_pool.evaluation.video.render import load_target, render_side_by_side

        folder = results_folder("videos", self.arguments.out)
        targets: dict[str, EvaluationTarget] = {}
        for path in self.arguments.run:
            name = path if Path(path).name in targets else Path(path).name
            with self.opened(path) as (run, options):
                targets[name] = load_target(run, self.settings, **options)
        video = render_side_by_side(folder, targets, self.settings, self.perturbation)
        print_paths([video])


def report(arguments: Namespace, overrides: list[str]) -> int:
    """Write a report page of runs."""
    from marl_pool.config import parse
    from marl_pool.evaluation.settings import ReportSettings

    # Other keys are those of `evaluate`, which runs with evaluate=true.
    keys = [each.name for each in fields(ReportSettings)]
    own = [text for text in overrides if parse(text).key_or_group in keys]
    others = [text for text in overrides if text not in own]
    # Compose the settings of the page.
    config = composed("report", arguments, own)
    if config is None:
        return 0
    settings = ReportSettings(**config)
    if others and not settings.evaluate:
        raise InputError(
            f"{parse(others[0]).key_or_group}: expected one of {', '.join(keys)}, or "
            "evaluate=true and a key of `marl-pool evaluate`"
        )
    runs = [open_run("report", path) for path in arguments.run or [None]]
    from marl_pool.evaluation.report import page
    from marl_pool.evaluation.report.runs import read_runs

    page.new_page(arguments.out, runs)  # before the evaluations, which may take hours
    if settings.evaluate:
        _evaluate_missing(arguments, runs, others, settings)
    plugins = arguments.plugin
    print_paths([page.report(runs, arguments.out, settings, plugins=plugins)])
    if lacking := [one for one in read_runs(runs) if one.evaluation is None]:
        from marl_pool.training.errors import print_warning

        for one in lacking:
            print_warning(f"{one.run.path}: {one.evaluation_missing}")
        if not settings.evaluate:
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
    from marl_pool.evaluation.report.runs import read_runs, usual_settings

    found = read_runs(runs)
    usual = usual_settings(found)
    # What is typed decides which rows there are.
    if any(parse(text).key_or_group == "suite" for text in overrides):
        for key in ("stochastic", "worst_of", "perturbations", "transfer"):
            usual.pop(key, None)
    limit = page.env_timeout
    own = {"threads": page.threads, "env_timeout": limit}
    texts = [*as_overrides(usual), *overrides, *as_overrides(own)]
    # Compose the settings of the evaluations before any of them starts.
    how = compose("evaluate", texts, arguments.config_dir)
    lacking = [one.run for one in found if one.evaluation is None]
    for key in ("episodes", "seed", "checkpoint") if lacking else ():
        if key in usual and how[key] != usual[key]:
            raise InputError(
                f"{key}: expected {usual[key]}, by which the other runs were "
                f"evaluated, got {how[key]}"
            )
    for run in lacking:
        print_paths(Evaluate(arguments, **how).on_one(str(run.path)))


def _env(
    change: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    source: object,
    config: object = None,
) -> dict[str, Any] | None:
    """Return an environment's complete options, None without a change."""
    from marl_pool.config.checks import check_change

    if change is None:
        return None
    with names.trust(names.allowed(), source, config=config):
        return check_change("env", change, base)
