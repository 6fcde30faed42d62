"""How much of its return a policy keeps when what it sees is perturbed."""

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_pool.envs.base import World
from marl_pool.errors import UnfitTokensError
from marl_pool.evaluation.analyses import analyse
from marl_pool.evaluation.cases import Case, OtherWorld, cases_of
from marl_pool.evaluation.episodes import Played, play
from marl_pool.evaluation.heat_map import occluded_in_training
from marl_pool.evaluation.published import with_published
from marl_pool.evaluation.results import (
    CLEAN,
    CURVES,
    DOCUMENT,
    ROWS,
    TABLE,
    TRAINED,
    WORLD,
    Files,
    Result,
    print_table,
    write_csv,
    write_json,
)
from marl_pool.evaluation.statistics import paired_drop, summarize
from marl_pool.evaluation.subject import Subject, changed, cpu_threads
from marl_pool.policies.base import Policy
from marl_pool.progress import Progress
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.runs import Run

Watch = Callable[[Sequence[Case]], Iterable[Case]]
"""Passes the cases on one by one, and may show how far they are."""


def evaluate(
    policies: Mapping[str, Policy],
    make_world: Callable[[], World],
    perturbations: Sequence[Mapping[str, Any]] = (),
    *,
    others: Sequence[OtherWorld] = (),
    baselines: Mapping[str, Mapping[str, Policy]] | None = None,
    fixed: Collection[str] = (),
    stochastic: bool = False,
    seed: int = 0,
    watch: Watch = iter,
) -> list[Result]:
    """Measure policies clean and under perturbations.

    Every case plays one episode in each world, all in the same worlds with the same
    random numbers: the clean and the perturbed return of a world are a pair.

    A head for a fixed number of tokens cannot be measured with more of them, nor any
    under distractors of a type that the world lacks: such a case is reported as a gap.

    Args:
        policies: for each group, in eval mode; in float64 if a permutation is to
            change exactly nothing (`in_double`).
        make_world: makes the same worlds at each call.
        perturbations: ``{"name": …, "severities": […], **options}``.
        others: other worlds, in which the policies play unperturbed.
        baselines: other policies by name, which play clean episodes.
        fixed: groups that did not learn; their results say so.
        stochastic: measure the sampled policies beside the deterministic ones.
        seed: of the bootstrap.
        watch: wraps the list of cases, as a progress bar does.

    Raises:
        InputError: a wrong perturbation, or policies that don't fit the worlds.
    """
    cases = cases_of(policies, perturbations, others, make_world())
    if stochastic:
        cases += [replace(case, explore=True) for case in cases]
    cases += [Case(name, played) for name, played in (baselines or {}).items()]
    results: list[Result] = []
    clean: dict[bool, Mapping[str, np.ndarray]] = {}
    for case in watch(cases):
        gap = case.gap
        if not gap:
            make = case.other.make if case.other else make_world
            try:
                played = play(
                    case.policies, make(), case.perturbation, explore=case.explore
                )
            except UnfitTokensError as error:
                if case.name == CLEAN:
                    raise
                gap = str(error)
        if gap:
            results += [case.result(name, gap=gap) for name in policies]
            continue
        if case.name != CLEAN:
            results += _measure(case, played, clean[case.explore], seed)
            continue
        results += _measure(case, played, None, seed)
        if case.policy == TRAINED:
            clean[case.explore] = played.returns
    return [replace(result, fixed=result.group in fixed) for result in results]


def evaluate_run(
    run: "Run", settings: Mapping[str, Any], *, plugins: Collection[str] = ()
) -> list[Path]:
    """Measure a run's policy and write table, CSV, JSON and plot.

    The files go to the run's ``evaluation/``; earlier ones stay (`Files`).

    Args:
        run: an earlier run.
        settings: of `EvaluateSettings` and ``env``, as plain data.
        plugins: ``package.module:Class`` names that the run may use.

    Returns:
        The files written.

    Raises:
        InputError: no policy in the run, a wrong perturbation, no such device.
    """
    episodes = settings["episodes"]
    with cpu_threads(settings["threads"]):
        subject = Subject.load(run, settings, plugins)
        others = subject.others(settings["worlds"], episodes)
        results = evaluate(
            subject.policies,
            lambda: subject.worlds(episodes),
            settings["perturbations"],
            others=others,
            baselines=subject.baselines(),
            fixed=subject.fixed,
            stochastic=settings["stochastic"],
            seed=settings["seed"],
            watch=lambda cases: _watched(cases, episodes),
        )
        results = with_published(results, subject.policies, subject.env)
        about = _about(run, subject)
        title = (
            f"{run.path.name}: {subject.env['name']}, {episodes} episodes, "
            f"checkpoint {subject.name}"
        )
        print_table(results, title)
        files = Files(run.evaluation_dir)
        written = _write(files, results, about, title)
        return written + analyse(settings["analyses"], subject, others, episodes, files)


def _about(run: "Run", subject: Subject) -> dict[str, Any]:
    """What holds for all rows."""
    return {
        "run": run.path.name,
        "env": subject.env,
        "changed": changed(subject.trained_env, subject.env),
        "occluded_in_training": occluded_in_training(run.config),
        "seed": subject.seed,
        "checkpoint": subject.checkpoint,
        "iteration": subject.iteration,
        "package_version": __version__,
    }


def _measure(
    case: Case, played: Played, clean: Mapping[str, np.ndarray] | None, seed: int
) -> list[Result]:
    """Records of one case, for each group; ``clean`` are the returns to pair with."""
    results = []
    for name, returns in played.returns.items():
        summary = summarize(returns, seed=seed)
        numbers = {
            "episodes": summary.episodes,
            "std": summary.std,
            "self_query_lost": played.self_query_lost[name],
            "distinct": played.distinct,
            **_columns("mean", summary.mean),
            **_columns("iqm", summary.iqm),
        }
        if clean is not None:
            numbers |= _columns("drop", paired_drop(clean[name], returns, seed=seed))
        results.append(case.result(name, **numbers))
    return results


def _columns(name: str, interval: Sequence[float]) -> dict[str, float]:
    keys = (name, f"{name}_low", f"{name}_high")
    return dict(zip(keys, interval, strict=True))


def _watched(cases: Sequence[Case], episodes: int) -> Iterator[Case]:
    with Progress(len(cases) * episodes, unit="episodes") as progress:
        for done, case in enumerate(cases):
            progress.update(done * episodes)
            yield case
        progress.update(progress.total)


def _write(
    files: Files, results: Sequence[Result], about: Mapping[str, Any], title: str
) -> list[Path]:
    table, document = files.path(TABLE), files.path(DOCUMENT)
    write_csv(table, results, about)
    write_json(document, results, about)
    if importlib.util.find_spec("matplotlib") is None:
        print('no plot: pip install "marl-pool[plots]"')
        return [table, document]
    from marl_pool.evaluation.plots import plot_robustness
    from marl_pool.evaluation.rows import plot_rows

    if not any(result.perturbation == WORLD for result in results):
        plot_robustness(results, files.path(CURVES), title)
        return [table, document, files.path(CURVES)]
    plot_rows(results, files.path(ROWS), title)
    return [table, document, files.path(ROWS)]
