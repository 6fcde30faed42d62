"""Measurement of policies: paired episodes, clean, perturbed and in other envs.

A shuffle must cost an invariant policy exactly nothing, but in float32 the order of a
sum changes its last bits: see docs/decisions/002-float64-evaluation.md.
"""

import copy
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import Case, Played, TransferEnv, cases_of, play
from marl_pool.evaluation.results import (
    CLEAN,
    TRAINED,
    TRANSFER,
    Result,
    SeverityAUC,
    print_aucs,
    print_table,
)
from marl_pool.evaluation.settings import PerturbationLevels
from marl_pool.evaluation.statistics.intervals import (
    bootstrap,
    interquartile_mean,
    paired_drop,
)
from marl_pool.evaluation.statistics.scores import scored, severity_aucs
from marl_pool.perturbations.turns import steps_of_agents
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import InputError, UnfitTokensError

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_SHOWN = 24
"""Maximum number of rows on screen; a suite has more."""
OnProgress = Callable[[int, int], None]
"""Takes the number of finished cases and the number of all cases."""


@dataclass(frozen=True)
class EvaluationResults:
    """Numbers of an evaluation.

    Attributes:
        results: a row for each case and group.
        returns: ``(rows, episodes)`` float64, in the order of ``results``. Column j is
            the same environment in each row; NaN where nothing was measured.
        aucs: mean score over the severities of each perturbation.
    """

    results: list[Result]
    returns: np.ndarray
    aucs: list[SeverityAUC]

    def __str__(self) -> str:
        with redirect_stdout(io.StringIO()) as output:
            self.show("evaluation")
        return output.getvalue().rstrip("\n")

    def to_pandas(self) -> "DataFrame":
        """Return a row for each of ``results``; needs the extra ``plots``."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.results])

    def show(self, title: str) -> None:
        """Print AUCs and rows; of many rows only unperturbed or missing ones."""
        print_aucs(self.aucs)
        rows = self.results
        if len(rows) > MOST_SHOWN:
            rows = [row for row in rows if not row.perturbed or row.missing]
            num_hidden = len(self.results) - len(rows)
            title = f"{title}; {num_hidden} perturbed rows are left out"
        print_table(rows, title)


def measure(
    policies: Mapping[str, Policy],
    make_env: Callable[[], BatchedEnv],
    perturbations: Sequence[PerturbationLevels] = (),
    *,
    transfers: Sequence[TransferEnv] = (),
    baselines: Mapping[str, Mapping[str, Policy]] | None = None,
    fixed: Collection[str] = (),
    stochastic: bool = False,
    worst_of: int = 1,
    seed: int = 0,
    workers: int = 1,
    on_progress: OnProgress = lambda done, total: None,
) -> EvaluationResults:
    """Measure policies clean, under perturbations and in other environments.

    Every case plays one episode in each environment, all in the same environments with
    the same random numbers: the clean and the perturbed return of an environment are a
    pair.

    Reordering perturbations, which must not change an invariant policy's return at all,
    are played in the precision of ``policies``. All others are played in float32, which
    takes half the time; their drops are relative to clean episodes in float32, which
    get no row.

    A head for a fixed number of tokens cannot take more of them, and distractors cannot
    have a type that the environment lacks. The row of such a case has the reason in
    place of numbers.

    Args:
        policies: policies by group, in eval mode; in float64 (`to_float64`) if a
            permutation is to change exactly nothing.
        make_env: makes the same environments at each call.
        perturbations: perturbations with their severities.
        transfers: other environments, in which the policies play unperturbed. They are
            other tasks, so their rows have no drop.
        baselines: other policies by name, which play clean episodes.
        fixed: groups that were not trained; marked in their results.
        stochastic: measure the sampled policies in addition to the deterministic ones.
        worst_of: samples of each perturbation under which an episode is played. With
            more than one, `Result.worst` is of the lowest returns, all else of the
            first sample.
        seed: seed of the bootstrap.
        workers: cases played at a time, each in a separate thread; 1 for this thread.
        on_progress: called before any episode is played, and after each case.

    Raises:
        InputError: a wrong perturbation, or policies that don't fit the environments.
    """
    # Listing the cases builds every perturbation before any episode is played.
    env = make_env()
    cases = cases_of(policies, perturbations, transfers, env)
    nothing, steps = np.full(env.num_envs, np.nan), steps_of_agents(env)
    # A simulator costs more memory than a second thread is worth.
    workers = 1 if env.simulated else workers
    del env
    # Add the baselines in each environment, and repeat with sampled actions what
    # depends on them. A baseline does so by its opponents, the groups not trained.
    unpaired = [
        Case(name, group_policies) for name, group_policies in (baselines or {}).items()
    ]
    unpaired += [
        Case(name, group_policies, name=TRANSFER, transfer=transfer)
        for transfer in transfers
        if not transfer.missing
        for name, group_policies in transfer.baselines.items()
    ]
    if stochastic:
        cases += [replace(case, explore=True) for case in cases]
    if stochastic and fixed:
        unpaired += [replace(case, explore=True) for case in unpaired]
    cases += unpaired
    cases = _with_float32(cases, policies)

    # Play them; drops are paired with the clean returns of the same precision.
    ends = {case.end for case in cases if case.end and case.end < steps}
    jobs = [partial(_play_case, case, make_env, ends, worst_of) for case in cases]
    episodes = list(_play_all(jobs, workers, on_progress))
    clean = {
        (case.explore, case.exact): played
        for case, played in zip(cases, episodes, strict=True)
        if not isinstance(played, str) and (case.name, case.policy) == (CLEAN, TRAINED)
    }

    # Summarize each case in a row for each group; missing returns are NaN.
    results, returns = [], []
    for case, played in zip(cases, episodes, strict=True):
        if case.hidden:
            continue
        # A transfer environment is another task: a difference would be no drop.
        paired = case.policy == TRAINED and case.name not in (CLEAN, TRANSFER)
        for name in policies:
            numbers: dict[str, Any] = {"missing": played}
            row_returns = nothing
            if not isinstance(played, str):
                twin = clean[case.explore, case.exact][0] if paired else None
                numbers = _numbers(case, played, name, twin, seed)
                row_returns = played[0].returns[name]
            results.append(case.result(name, fixed=name in fixed, **numbers))
            returns.append(row_returns)

    # Normalize by the baselines of the same environment.
    table = np.stack(returns)
    aucs = severity_aucs(results, table, seed=seed)
    return EvaluationResults(scored(results, table, seed=seed), table, aucs)


def _with_float32(cases: Sequence[Case], policies: Mapping[str, Policy]) -> list[Case]:
    """Move cases that need no float64 to float32, and append hidden clean ones."""
    # Policies that have no float64 stay as they are.
    weights = (weight for policy in policies.values() for weight in policy.parameters())
    if not any(weight.dtype == torch.float64 for weight in weights):
        return list(cases)
    copies = copy.deepcopy(dict(policies))
    single = {name: policy.float() for name, policy in copies.items()}
    result = [
        case
        if case.perturbation is None or case.perturbation.reorders or not case.severity
        else replace(case, policies=single, exact=False)
        for case in cases
    ]
    # Pair their drops with clean episodes in the same precision.
    explored = dict.fromkeys(case.explore for case in result if not case.exact)
    clean = Case(TRAINED, single, exact=False, hidden=True)
    return [*result, *(replace(clean, explore=explore) for explore in explored)]


def _play_case(
    case: Case, make_env: Callable[[], BatchedEnv], ends: Collection[int], worst_of: int
) -> list[Played] | str:
    """Return the episodes under each sample, or the reason why there are none.

    ``ends`` are the steps at which perturbations of any case end within the episode.
    """
    if case.missing:
        return case.missing
    make = case.transfer.make if case.transfer else make_env
    perturbed = case.perturbation is not None
    # Clean episodes are paired with every perturbation that ends.
    after = [step for step in ends if not perturbed or step == case.end]
    if case.policy != TRAINED or case.transfer:
        after = []
    options: dict[str, Any] = {"explore": case.explore, "after": after}
    try:
        return [
            play(case.policies, make(), case.perturbation, draw=draw, **options)
            for draw in range(worst_of if perturbed else 1)
        ]
    except InputError as error:
        # Policies must fit their own environment; other cases become missing rows.
        if case.name == CLEAN:
            raise
        if isinstance(error, UnfitTokensError):
            return str(error)
        error.args = (f"{case.title}: {error}",)  # of the same class
        raise


def _play_all(
    jobs: Sequence[Callable[[], list[Played] | str]],
    workers: int,
    on_progress: OnProgress,
) -> Iterator[list[Played] | str]:
    """Yield the episodes of each job in order, or the reason why there are none."""
    on_progress(0, len(jobs))
    if workers == 1:
        for done, job in enumerate(jobs, 1):
            yield job()
            on_progress(done, len(jobs))
        return
    # Threads, not processes: nearly all time is spent in torch, which releases the
    # interpreter's lock.
    with ThreadPoolExecutor(workers) as pool:
        # Each thread runs in a copy of the context, which holds the trusted names.
        futures = [pool.submit(copy_context().run, job) for job in jobs]
        try:
            for done, future in enumerate(futures, 1):
                yield future.result()
                on_progress(done, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)


def _numbers(
    case: Case, played: Sequence[Played], group: str, clean: Played | None, seed: int
) -> dict[str, Any]:
    """Return the numbers of a row; ``clean`` are the episodes to pair with."""
    first = played[0]
    returns = first.returns[group]
    intervals = {
        "mean": bootstrap(returns, seed=seed),
        "iqm": bootstrap(returns, interquartile_mean, seed=seed),
    }
    # Only perturbed returns have a drop from the clean ones.
    if clean is not None:
        unperturbed = clean.returns[group]
        intervals["drop"] = paired_drop(unperturbed, returns, seed=seed)
        if case.end in first.after:
            tails = (episodes.after[case.end][group] for episodes in (clean, first))
            intervals["drop_after"] = paired_drop(*tails, seed=seed)
        if len(played) > 1:
            worst = np.min([sample.returns[group] for sample in played], axis=0)
            intervals["worst"] = bootstrap(worst, seed=seed)
            intervals["worst_drop"] = paired_drop(unperturbed, worst, seed=seed)
    numbers: dict[str, Any] = {"episodes": len(returns)}
    # A single episode has no spread.
    if len(returns) > 1:
        numbers["std"] = float(returns.std(ddof=1))
    for name, (value, low, high) in intervals.items():
        numbers |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return numbers
