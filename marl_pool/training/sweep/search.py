"""Hyperparameter search: Optuna proposes trials from the scores of earlier ones."""

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna

from marl_pool.files.tables import print_table
from marl_pool.options.overrides import written
from marl_pool.runs.sweep import (
    CHOICE,
    INT_UNIFORM,
    LOG_UNIFORM,
    Proposal,
    Space,
    Sweep,
    proposal_name,
    rounded,
    stopped_early,
)
from marl_pool.training.cluster import LOCAL, cluster_address
from marl_pool.training.jobs import JOBS
from marl_pool.training.supervised.fit import make_task
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.sweep.halving import score_of
from marl_pool.training.sweep.plan import PlannedTrial, SearchPlan
from marl_pool.training.sweep.trial import Outcome
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import print_line

MOST_SUGGESTIONS = 100
"""Suggestions for one trial, until one is new and combines values that fit."""


@dataclass
class Search:
    """State of a search: its proposals, and their trials.

    Attributes:
        sweep: sweep whose folder has the proposals.
        plan: plan with a trial for each proposal.
        ended: names of the trials whose scores count for the next proposals.

    Raises:
        InputError: the trials have no such metric, or ASHA could not stop them.
    """

    sweep: Sweep
    plan: SearchPlan
    ended: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.settings, self.trials = self.plan.settings, self.plan.trials
        self.proposals = self.sweep.proposals()
        self.metric = self.settings.metric or "return_mean"
        config = self.plan.probes[0].config
        if not self.settings.metric and isinstance(config, FitConfig):
            self.metric = f"-validation_{make_task(config).metric}"
        # Reject a metric that the runs of earlier sessions lack.
        for trial in self.trials:
            self.score(trial)
        # ASHA compares a trial with the other runs in the sweep's folder.
        address = cluster_address(self.settings.address)
        if self.settings.asha and config.storage and address != LOCAL:
            raise InputError(
                "sweep.asha: expected false on a cluster with --storage, whose "
                "machines share no disk on which trials could be compared, got "
                f"true at {address}; with a shared disk, leave out --storage"
            )

    @property
    def names(self) -> list[str]:
        """Names of all trials, including those not yet proposed."""
        count = max(self.settings.trials, len(self.proposals))
        return [proposal_name(number) for number in range(count)]

    @property
    def stopped_early(self) -> set[str]:
        """Names of the trials that were stopped because others were better."""
        return stopped_early(self.proposals)

    def validate_current(self) -> None:
        """Reject proposals that another session has changed since they were read."""
        proposals = self.sweep.proposals()
        if proposals != self.proposals or len(proposals) != len(self.trials):
            raise InputError(
                f"{self.sweep.path}: expected {len(self.trials)} trials, as when this "
                f"session began, got {len(proposals)}: another session has changed the "
                "search; repeat the command"
            )

    def upcoming(self, unfinished: Sequence[PlannedTrial]) -> Iterator[PlannedTrial]:
        """Yield unfinished trials, then new ones, each proposed when it can start."""
        self.ended = {trial.name for trial in self.trials if trial not in unfinished}
        yield from unfinished
        while len(self.proposals) < self.settings.trials:
            scored = [
                (trial.values, score)
                for trial in self.trials
                if trial.name in self.ended
                if (score := self.score(trial)) is not None
            ]
            if (trial := self._propose_new(scored)) is None:
                count = len(self.proposals)
                print_line(
                    f"{self.sweep.path}: {MOST_SUGGESTIONS} suggestions after {count} "
                    "trials had no new values"
                )
                return
            yield trial

    def _propose_new(
        self, scored: Sequence[tuple[Mapping[str, Any], float]]
    ) -> PlannedTrial | None:
        """Add a trial with the first suggestion that is new and whose values fit.

        Returns:
            The trial, or None if `MOST_SUGGESTIONS` have no other values than before.

        Raises:
            InputError: in none of them do the values fit each other.
        """
        seed = (self.plan.probes[0].config.seed, len(self.proposals))
        # As text, 1 is neither 1.0 nor true.
        proposed = [json.dumps(proposal.values) for proposal in self.proposals]
        is_repeated = False
        for number in range(MOST_SUGGESTIONS):
            draw = (*seed, number) if number else seed
            # The sampler would repeat itself: look for other values at random.
            values = suggested(self.plan.space, () if is_repeated else scored, draw)
            if json.dumps(values) in proposed:
                is_repeated = True
                continue
            try:
                self.plan.make(proposal_name(len(self.trials)), values)
            except InputError as error:
                reason = error
                continue
            return self.propose(values)
        if is_repeated:
            return None
        raise InputError(f"{MOST_SUGGESTIONS} suggestions are invalid: {reason}")

    def propose(self, values: Mapping[str, Any]) -> PlannedTrial:
        """Add a trial, and record it before it starts."""
        trial = self.plan.add(values)
        self.proposals.append(Proposal(dict(values)))
        self.sweep.write_proposals(self.proposals)
        return trial

    def end(self, trial: PlannedTrial, outcome: Outcome) -> None:
        """Count the score of a trial, unless it failed.

        Raises:
            InputError: its run lacks the metric.
        """
        if outcome.was_worse:
            self.proposals[self.trials.index(trial)].stopped_early = True
            self.sweep.write_proposals(self.proposals)
        self.score(trial)
        if not outcome.reason:
            self.ended.add(trial.name)

    def score(self, trial: PlannedTrial) -> float | None:
        """Return the best score of a trial so far, or None without one."""
        if (run := self.sweep.run(trial)) is None:
            return None
        # The result of a fit, whose folds alone need to know; cheaper than `has_ended`.
        result, rows = JOBS[run.verb].result, run.metrics.readable_rows()
        is_over = bool(result) and (run.path / result).is_file()
        return score_of(rows, self.metric, has_ended=is_over)

    @property
    def description(self) -> list[str]:
        """Lines on the size of the search, its ranges and its metric."""
        verb = "minimizing" if self.metric.startswith("-") else "maximizing"
        ranges = (
            f"  {key}: {kind}({', '.join(map(str, values))})"
            for key, (kind, *values) in self.plan.space.items()
        )
        num_started, count = len(self.proposals), len(self.names)
        return [
            f"{count} trials, {num_started} of them started, {verb} "
            f"{self.metric.removeprefix('-')} over",
            *ranges,
        ]

    def print_results(self, states: Mapping[str, str]) -> None:
        """Print the trials, the best first, and the command of the best one."""
        job, early, rows = JOBS[self.sweep.verb], self.stopped_early, []
        ranking = self.ranking
        sign = -1 if self.metric.startswith("-") else 1
        for trial, score in ranking:
            steps = job.logged(self.sweep.run(trial))
            state = "stopped early" if trial.name in early else states[trial.name]
            options = " ".join(f"{key}={value}" for key, value in trial.values.items())
            best = "" if score is None else f"{sign * score:.4g}"
            rows.append((trial.name, options, best, f"{steps:,}", state))
        if not rows:
            return
        name = self.metric.removeprefix("-")
        columns = ("trial", "options", f"best {name}", job.unit, "state")
        print_table(columns, rows, title=f"{self.sweep.path}", num_names=2)
        if ranking[0][1] is not None:
            print(f"best: {shlex.join(self.command(ranking[0][0]))}")

    def command(self, trial: PlannedTrial) -> list[str]:
        """Return the command, as words, that trains a trial from scratch."""
        folder = self.sweep.config_dir
        args = [text for text in self.sweep.overrides if not text.startswith("sweep.")]
        values = (f"{key}={written(value)}" for key, value in trial.values.items())
        flags = ["--config-dir", str(folder)] if folder else []
        threads = f"threads={trial.config.threads}"
        return ["marl-pool", self.sweep.verb, *args, *values, threads, *flags]

    @property
    def ranking(self) -> list[tuple[PlannedTrial, float | None]]:
        """Trials with their scores, the best first."""
        scored = [(trial, self.score(trial)) for trial in self.trials]
        return sorted(scored, key=lambda pair: _or_worst(pair[1]), reverse=True)


def suggested(
    space: Space,
    scored: Iterable[tuple[Mapping[str, Any], float]],
    seed: Sequence[int],
) -> dict[str, Any]:
    """Return values for another trial, by Optuna's TPE sampler.

    They depend only on the arguments, so that a resumed search proposes what an
    uninterrupted one would.

    Args:
        space: key → range.
        scored: values and score of each trial that has ended, in order.
        seed: seed of the search, number of the trial, and number of the suggestion
            if others were invalid.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (state,) = np.random.SeedSequence(seed).generate_state(1)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=int(state))
    )
    ranges = {key: distribution(range_) for key, range_ in space.items()}
    for values, score in scored:
        study.add_trial(
            optuna.trial.create_trial(
                params={key: as_number(values[key], space[key]) for key in space},
                distributions=ranges,
                value=score,
            )
        )
    params = study.ask(ranges).params
    return {key: value_of(params[key], space[key]) for key in space}


def as_number(value: Any, range_: Sequence[Any]) -> Any:
    """Return a value as Optuna gets it: the place of a choice, which may be a list."""
    kind, *choices = range_
    if kind != CHOICE:
        return value
    return list(map(json.dumps, choices)).index(json.dumps(value))


def value_of(number: Any, range_: Sequence[Any]) -> Any:
    """Return the choice, or rounded number, that Optuna suggests."""
    return range_[1:][number] if range_[0] == CHOICE else rounded(number, range_)


def distribution(range_: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution of ``[kind, *arguments]``."""
    kind, *values = range_
    if kind == CHOICE:
        return optuna.distributions.CategoricalDistribution(range(len(values)))
    low, high = values
    if kind == INT_UNIFORM:
        return optuna.distributions.IntDistribution(low, high)
    return optuna.distributions.FloatDistribution(low, high, log=kind == LOG_UNIFORM)


def _or_worst(score: float | None) -> float:
    return -math.inf if score is None else score
