"""Hyperparameter search: trials proposed by Optuna, stopped early by ASHA."""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import optuna
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from typing_extensions import override

from marl_pool.files.tables import print_table
from marl_pool.runs.sweep import (
    CHOICE,
    INT_UNIFORM,
    LOG_UNIFORM,
    Proposal,
    SearchPlan,
    Space,
    Sweep,
    Trial,
    proposal_name,
)
from marl_pool.training.cluster import LOCAL, cluster_address
from marl_pool.training.jobs import JOBS
from marl_pool.training.settings import SweepSettings
from marl_pool.training.supervised.fit import make_task
from marl_pool.training.supervised.settings import FitConfig
from marl_pool.training.sweep.trial import (
    CONFIG,
    REASON,
    SCORE,
    SHARE,
    TRIAL,
    score_of,
    share_of,
)
from marl_pool.utils.errors import InputError

DIGITS = 4
"""Significant digits of a proposed number, so that commands are short."""
GRACE, REDUCTION, WHOLE = 10, 3, 100
"""A trial may be stopped after 10, 30 and 90 percent of its training, unless it is in
the best third of the trials that came as far."""


@dataclass
class TrialSearch:
    """State of a search: what was proposed, and what became of it.

    Args:
        sweep: its folder has the proposals.
        plan: space, and how to compose a trial.
        settings: number of trials, and metric.
        trials: those that earlier sessions proposed, in order; new ones are appended.

    Raises:
        InputError: the trials have no such metric, or ASHA could not stop them.
    """

    sweep: Sweep
    plan: SearchPlan
    settings: SweepSettings
    trials: list[Trial]

    def __post_init__(self) -> None:
        self.proposals = self.sweep.proposals()
        self.metric = self.settings.metric or "return_mean"
        if not self.settings.metric and self.sweep.verb == "fit":
            config = FitConfig.from_plain(self.plan.probes[0].config)
            self.metric = f"-validation_{make_task(config).metric}"
        # Runs of earlier sessions tell whether there is such a metric.
        for trial in self.trials:
            self.score(trial)
        # Early stopping needs a file that reaches the trials.
        storage = self.plan.probes[0].config.get("storage")
        address = cluster_address(self.settings.address)
        if self.settings.asha and storage and address != LOCAL:
            raise InputError(
                "sweep.asha: expected false on a cluster with --storage, whose "
                "machines share no disk on which a trial could be told to stop, got "
                f"true at {address}; with a shared disk, leave out --storage"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its searcher to restore experiments, a feature not used here.
        return {}

    def __deepcopy__(self, memo: object) -> Self:
        # Tune runs copies of searcher and scheduler, which share this state.
        return self

    @property
    def names(self) -> list[str]:
        """Names of all trials, with those that are not proposed yet."""
        count = max(self.settings.trials, len(self.proposals))
        return [proposal_name(number) for number in range(count)]

    @property
    def stopped_early(self) -> set[str]:
        """Names of the trials that were stopped because others were better."""
        return {
            name
            for name, proposal in zip(self.names, self.proposals, strict=False)
            if proposal.stopped_early
        }

    def validate_current(self) -> None:
        """Reject proposals that another session has changed since they were read."""
        proposals = self.sweep.proposals()
        if proposals != self.proposals or len(proposals) != len(self.trials):
            raise InputError(
                f"{self.sweep.path}: expected {len(self.trials)} trials, as when this "
                f"session began, got {len(proposals)}: another one has changed the "
                "search; repeat the command"
            )

    def propose(self, values: Mapping[str, Any]) -> Trial:
        """Add a trial, and write it down before it starts."""
        trial = self.plan.make(proposal_name(len(self.proposals)), values)
        self.proposals.append(Proposal(dict(values)))
        self.sweep.write_proposals(self.proposals)
        self.trials.append(trial)
        return trial

    def stop_early(self, name: str) -> None:
        """Write down that a trial is stopped for good."""
        place = self.names.index(name)
        self.proposals[place] = replace(self.proposals[place], stopped_early=True)
        self.sweep.write_proposals(self.proposals)

    def score(self, trial: Trial) -> float | None:
        """Return the best score of a trial so far; None without one."""
        run = self.sweep.run(trial)
        rows = [] if run is None else run.metrics.readable_rows()
        return score_of(rows, self.metric)

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
            # A trial may end before it is told to stop.
            stopped = trial.name in early and steps < job.total(trial.config)
            state = "stopped early" if stopped else states[trial.name]
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

    def command(self, trial: Trial) -> list[str]:
        """Return the words of the command that trains a trial anew."""
        from marl_pool.options.overrides import written

        folder = self.sweep.config_dir
        args = [text for text in self.sweep.overrides if not text.startswith("sweep.")]
        values = (f"{key}={written(value)}" for key, value in trial.values.items())
        flags = ["--config-dir", str(folder)] if folder else []
        return ["marl-pool", self.sweep.verb, *args, *values, *flags]

    @property
    def ranking(self) -> list[tuple[Trial, float | None]]:
        """Trials with their scores, the best first."""
        scored = [(trial, self.score(trial)) for trial in self.trials]
        return sorted(scored, key=lambda pair: _or_worst(pair[1]), reverse=True)


class Proposer(Searcher):
    """Propose unfinished trials first, then what Optuna suggests.

    Nothing of it is saved by Tune: the folder has the trials and their scores.

    Args:
        search: proposals, and runs of earlier sessions.
        unfinished: trials to resume.
        stop: file whose existence ends the session.
    """

    def __init__(
        self, search: TrialSearch, unfinished: Sequence[Trial], stop: Path
    ) -> None:
        super().__init__(metric=SCORE, mode="max")
        self.stop = stop
        self.search, self.unfinished = search, list(unfinished)
        self.proposed = dict[str, Trial]()
        usual = JOBS[search.sweep.verb].config.from_plain(search.plan.probes[0].config)
        self.seed: int = usual.seed
        # Scores of the trials that have ended, in this session or an earlier one.
        self.scores = {
            trial.name: score
            for trial in search.trials
            if trial not in unfinished and (score := search.score(trial)) is not None
        }

    @override
    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if self.stop.exists():
            return None
        if self.unfinished:
            trial = self.unfinished.pop(0)
        elif len(self.search.proposals) < self.search.settings.trials:
            scored = [
                (trial.values, self.scores[trial.name])
                for trial in self.search.trials
                if trial.name in self.scores
            ]
            seed = (self.seed, len(self.search.proposals))
            values = suggested(self.search.plan.space, scored, seed)
            trial = self.search.propose(values)
        else:
            return Searcher.FINISHED
        self.proposed[trial_id] = trial
        return {TRIAL: trial.name, CONFIG: trial.config}

    @override
    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        trial, result = self.proposed.pop(trial_id), result or {}
        if SCORE in result and not (error or result.get(REASON)):
            self.scores[trial.name] = result[SCORE]

    @override
    def save(self, checkpoint_path: str) -> None:
        """Save nothing: proposals and runs are in the folder."""

    @override
    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing; see `save`."""


class EarlyStopping(ASHAScheduler):
    """ASHA that lets a trial end its iteration and save itself.

    Args:
        search: trials of earlier sessions, which count.
        stop: asks a trial to stop.
    """

    def __init__(self, search: TrialSearch, stop: Callable[[str], None]) -> None:
        super().__init__(
            time_attr=SHARE,
            metric=SCORE,
            mode="max",
            max_t=WHOLE,
            grace_period=GRACE,
            reduction_factor=REDUCTION,
            # Otherwise a late report may enter an early, empty comparison.
            stop_last_trials=False,
        )
        self.search, self.stop = search, stop
        # Trials of this session compete with the earlier ones.
        job = JOBS[search.sweep.verb]
        for trial in search.trials:
            run, best = search.sweep.run(trial), -math.inf
            for row in run.metrics.readable_rows() if run else []:
                best = max(best, _or_worst(score_of([row], search.metric)))
                if best > -math.inf:
                    share = share_of(job, row, trial.config)
                    self._judge(trial.name, {SCORE: best, SHARE: share})

    def _judge(self, name: str, result: Mapping[str, Any]) -> str:
        # By name: Ray's ids of a trial differ between the sessions of a search.
        trial, (bracket,) = SimpleNamespace(trial_id=name), self._brackets
        action: str = bracket.on_result(trial, result[SHARE], result[SCORE])
        return action

    @override
    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> str:
        name = trial.config[TRIAL]
        is_worse = SCORE in result and self._judge(name, result) == self.STOP
        stopped = self.search.stopped_early
        if is_worse and result[SHARE] < WHOLE and name not in stopped:
            self.search.stop_early(name)
            self.stop(name)
        return str(self.CONTINUE)

    @override
    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: dict[str, Any]
    ) -> None:
        """Do nothing: the last report has been compared."""


def suggested(
    space: Space,
    scored: Iterable[tuple[Mapping[str, Any], float]],
    seed: Sequence[int],
) -> dict[str, Any]:
    """Return values for another trial, by Optuna's TPE sampler.

    They depend on nothing but the arguments, so that a resumed search proposes what an
    uninterrupted one would.

    Args:
        space: key → range.
        scored: values and score of each trial that has ended, in order.
        seed: seed of the search, and number of the trial.
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
                params=dict(values), distributions=ranges, value=score
            )
        )
    params = study.ask(ranges).params
    return {key: rounded(params[key], space[key]) for key in space}


def distribution(range_: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution of ``[kind, *arguments]``."""
    kind, *values = range_
    if kind == CHOICE:
        return optuna.distributions.CategoricalDistribution(values)
    low, high = values
    if kind == INT_UNIFORM:
        return optuna.distributions.IntDistribution(low, high)
    return optuna.distributions.FloatDistribution(low, high, log=kind == LOG_UNIFORM)


def rounded(value: Any, range_: Sequence[Any]) -> Any:
    """Round a suggested number to `DIGITS` digits, inside its range."""
    kind, *values = range_
    if kind in (CHOICE, INT_UNIFORM):
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), values[0]), values[1])


def _or_worst(score: float | None) -> float:
    return -math.inf if score is None else score
