"""Measure policies: episodes clean, perturbed and in other worlds, all paired."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import Case, TransferEnv, cases_of
from marl_pool.evaluation.episodes import Played, play
from marl_pool.evaluation.results import (
    CLEAN,
    TRAINED,
    WORLD,
    Area,
    Result,
    print_areas,
    print_table,
)
from marl_pool.evaluation.statistics.intervals import paired_drop, summarize
from marl_pool.evaluation.statistics.scores import areas_of, scored
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import UnfitTokensError

Watch = Callable[[int, int], None]
"""Takes how many cases are done, and of how many."""


@dataclass(frozen=True)
class Measured:
    """What came out of the cases.

    Attributes:
        results: a row for each case and group.
        returns: ``(rows, episodes)`` float64, in the order of the rows; column j is
            the same world in each. NaN where nothing was measured.
        areas: one number for each perturbation.
    """

    results: list[Result]
    returns: np.ndarray
    areas: list[Area]

    def show(self, title: str) -> None:
        """Print the rows, and below them the areas."""
        print_table(self.results, title)
        print_areas(self.areas)


def measure(
    policies: Mapping[str, Policy],
    make_world: Callable[[], BatchedEnv],
    perturbations: Sequence[Mapping[str, Any]] = (),
    *,
    others: Sequence[TransferEnv] = (),
    baselines: Mapping[str, Mapping[str, Policy]] | None = None,
    fixed: Collection[str] = (),
    stochastic: bool = False,
    seed: int = 0,
    workers: int = 1,
    watch: Watch = lambda done, total: None,
) -> Measured:
    """Measure policies clean and under perturbations.

    Every case plays one episode in each world, all in the same worlds with the same
    random numbers: the clean and the perturbed return of a world are a pair.

    Float64 is for what an invariant policy must not notice, another order, and for
    whatever is compared with the clean episodes as they are reported. Under other
    perturbations float32 says the same in half the time; their drops are from clean
    episodes in float32, which no row shows.

    A head for a fixed number of tokens cannot be measured with more of them, nor any
    under distractors of a type that the world lacks: such a case is reported as a gap.

    Args:
        policies: for each group, in eval mode; in float64 if a permutation is to
            change exactly nothing (`to_float64`).
        make_world: makes the same worlds at each call.
        perturbations: ``{"name": …, "severities": […], **options}``.
        others: other worlds, in which the policies play unperturbed. What they get
            there is no drop of what they get here: the task is another one.
        baselines: other policies by name, which play clean episodes.
        fixed: groups that did not learn; their results say so.
        stochastic: measure the sampled policies beside the deterministic ones.
        seed: of the bootstrap.
        workers: how many cases are played at a time, each by a thread of its own.
        watch: is told of the progress, first before anything is played.

    Raises:
        InputError: a wrong perturbation, or policies that don't fit the worlds.
    """
    cases = cases_of(policies, perturbations, others, make_world())
    if stochastic:
        cases += [replace(case, explore=True) for case in cases]
    cases += _baseline_cases(baselines or {}, others)
    played_cases = _in_single(cases, policies)
    episodes = list(_play_all(played_cases, make_world, workers, watch))
    clean = {
        (case.explore, case.exact): played.returns
        for case, (played, _) in zip(played_cases, episodes, strict=True)
        if played is not None and case.name == CLEAN and case.policy == TRAINED
    }
    results: list[Result] = []
    returns: list[np.ndarray | None] = []
    for case, (played, gap) in zip(played_cases, episodes, strict=True):
        if case.hidden:
            continue
        if played is None:
            results += [case.result(name, gap=gap) for name in policies]
            returns += [None] * len(policies)
            continue
        # Another world is another task: a difference to it would be no drop.
        paired = case.policy == TRAINED and case.name not in (CLEAN, WORLD)
        pairs = clean[case.explore, case.exact] if paired else None
        results += _rows(case, played, pairs, seed)
        returns += [played.returns[name] for name in policies]
    results = [replace(result, fixed=result.group in fixed) for result in results]
    table = _stacked(returns)
    return Measured(
        scored(results, table, seed=seed), table, areas_of(results, table, seed=seed)
    )


def _in_single(cases: Sequence[Case], policies: Mapping[str, Policy]) -> list[Case]:
    """Let cases that need no float64 be played in float32, and the clean ones again.

    The latter come last; they are not shown.
    """
    weights = [weight for policy in policies.values() for weight in policy.parameters()]
    if not any(weight.dtype == torch.float64 for weight in weights):
        return list(cases)
    copies = copy.deepcopy(dict(policies))
    single = {name: policy.float() for name, policy in copies.items()}

    def played(case: Case) -> Case:
        perturbation = case.perturbation
        if perturbation is None or perturbation.reorders or case.severity == 0:
            return case
        return replace(case, policies=single, exact=False)

    found = [played(case) for case in cases]
    explored = {case.explore: None for case in found if not case.exact}
    clean = Case(TRAINED, single, exact=False, hidden=True)
    return [*found, *(replace(clean, explore=explore) for explore in explored)]


def _baseline_cases(
    baselines: Mapping[str, Mapping[str, Policy]], others: Sequence[TransferEnv]
) -> list[Case]:
    """Who else plays, clean: in the world itself and in the others."""
    cases = [Case(name, played) for name, played in baselines.items()]
    for other in others:
        if not other.gap:
            cases += [
                Case(name, played, name=WORLD, other=other)
                for name, played in other.baselines.items()
            ]
    return cases


Outcome = tuple[Played | None, str]
"""The episodes of a case, or None and why there are none."""


def _play_all(
    cases: Sequence[Case],
    make_world: Callable[[], BatchedEnv],
    workers: int,
    watch: Watch,
) -> Iterator[Outcome]:
    """Yield each case's episodes, in order."""
    watch(0, len(cases))
    # Threads, not processes: nearly all time is spent in torch, which lets go of the
    # interpreter. A simulator costs more memory than a second thread is worth.
    with ThreadPoolExecutor(1 if make_world().simulated else workers) as pool:
        # Each thread runs in a copy of the context, which says what may be imported.
        futures = [
            pool.submit(copy_context().run, _play, case, make_world) for case in cases
        ]
        try:
            for done, future in enumerate(futures, 1):
                yield future.result()
                watch(done, len(cases))
        finally:
            pool.shutdown(cancel_futures=True)


def _play(case: Case, make_world: Callable[[], BatchedEnv]) -> Outcome:
    if case.gap:
        return None, case.gap
    make = case.other.make if case.other else make_world
    try:
        return play(case.policies, make(), case.perturbation, explore=case.explore), ""
    except UnfitTokensError as error:
        if case.name == CLEAN:
            raise
        return None, str(error)


def _stacked(returns: Sequence[np.ndarray | None]) -> np.ndarray:
    episodes = next(len(row) for row in returns if row is not None)
    missing = np.full(episodes, np.nan)
    return np.stack([missing if row is None else row for row in returns])


def _rows(
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
