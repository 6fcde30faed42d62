"""Scores of all methods under all conditions, from one tidy table of results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER
from marl_pool.evaluation.statistics.intervals import Interval, episode_resamples
from marl_pool.evaluation.statistics.scores import (
    HEURISTIC,
    INTERVAL_FROM,
    RANDOM,
    Scores,
    mean_over,
    mean_score,
    over_seeds,
    scores_of,
    this_policy_only,
)

NOT_ASKED = "not in the suite of this evaluation"
ConditionKind = Literal["clean", "level", "area", "environment"]


@dataclass(frozen=True)
class Condition:
    """The condition that a number was measured under.

    Attributes:
        kind: unperturbed, one severity of a perturbation, the mean over its severities,
            or another environment.
        label: of the perturbation or the other environment.
        severity: of a level.
        levels: severities of an area, with 0; areas over others are other conditions.
        options: of another environment, as JSON, since labels are chosen by users.
    """

    kind: ConditionKind
    label: str = CLEAN
    severity: float = 0.0
    levels: tuple[float, ...] = ()
    options: str = ""


UNPERTURBED = Condition("clean")


def _results_table(methods: Sequence[Method]) -> pd.DataFrame:
    """Concatenate the evaluations of all runs.

    Returns:
        One row per run, policy and condition, of deterministic policies of groups that
        learn: the columns of an evaluation's rows and ``run`` (its name) and
        ``condition``. Returns of all rows are paired, episode by episode.
    """
    tables = [
        run.evaluation.rows.assign(run=run.name)
        for method in methods
        for run in method.evaluated
        if run.evaluation
    ]
    if not tables:
        return pd.DataFrame(columns=["group", "policy", "run"])
    table = pd.concat(tables, ignore_index=True)
    table = table[~table["stochastic"] & ~table["fixed"]]
    return table.assign(condition=[_condition(row) for row in table.itertuples()])


def _condition(row: Any) -> Condition:
    if row.perturbation == TRANSFER:
        options = json.dumps(row.transfer_env, sort_keys=True)
        return Condition("environment", row.label, options=options)
    if row.perturbation == CLEAN:
        return UNPERTURBED
    return Condition("level", row.label, row.severity)


@dataclass(frozen=True)
class MethodScores:
    """The scores of one method; returns, where no score is defined.

    Attributes:
        method: their method.
        conditions: those that all of its evaluated runs were measured under, in order.
        scores: with a column for each condition.
        missing: the reason why there is no number, by condition.
    """

    method: Method
    conditions: tuple[Condition, ...]
    scores: Scores
    missing: dict[Condition, str]

    def under(self, conditions: Sequence[Condition]) -> Scores:
        """The scores under some of its conditions."""
        return self.scores.of(
            [self.conditions.index(condition) for condition in conditions]
        )

    def mean(self, condition: Condition) -> Interval:
        """Mean and interval over seeds; of a single seed the interval over episodes."""
        scores = self.under([condition])
        interval = this_policy_only if scores.seeds < INTERVAL_FROM else over_seeds
        return interval(scores, mean_score)

    def points(self, condition: Condition) -> list[float]:
        """The score of each seed."""
        points: list[float] = self.under([condition]).points[:, 0].tolist()
        return points


class GroupScores:
    """The scores of one group of agents that learned, over all evaluations.

    Attributes:
        rows: rows of the table about the group, in runs in which it learned.
        unit: ``"score"``, or ``"return"`` where no score is defined: scores need a
            random policy, a scripted one that is better, and a single group that
            learns, since the return of a baseline depends on the other groups.
        conditions: all conditions of any evaluation, in order; areas come last.
        measured: the scores of the methods that have an evaluation of the group.
    """

    def __init__(
        self, methods: Sequence[Method], table: pd.DataFrame, group: str
    ) -> None:
        self.group = group
        # Rows of the group in the runs in which it learned; it is scripted in others.
        trained = table[table["policy"] == TRAINED]
        learned = trained[trained["group"] == group]
        rows = table[(table["group"] == group) & table["run"].isin(learned["run"])]
        self.rows = rows
        # Returns, or the reason why they are missing.
        cells = rows["returns"].where(rows["missing"] == "", rows["missing"])
        keys = pd.MultiIndex.from_frame(rows[["run", "policy", "condition"]])
        self._cells = cells.set_axis(keys).to_dict()
        # Severities that each run was tested at, by perturbation; each makes an area.
        levels = learned[~learned["perturbation"].isin([CLEAN, TRANSFER])]
        self._tested = {
            key: tuple(sorted({0.0, *values}))
            for key, values in levels.groupby(["run", "label"], sort=False)["severity"]
        }
        areas = [
            Condition("area", label, levels=tested)
            for (_, label), tested in self._tested.items()
        ]
        self.conditions = list(dict.fromkeys([*learned["condition"], *areas]))

        # A second group that learns makes the returns of the baselines ambiguous.
        alone = trained.groupby("run")["group"].nunique() == 1
        self._runs = list(learned["run"].unique())
        scored = alone[self._runs].all() and all(map(self._baselines, self._runs))
        self.unit = "score" if scored else "return"
        methods_with_scores = (method for method in methods if not self.missing(method))
        self.measured = list(map(self._measure, methods_with_scores))

    def missing(self, method: Method) -> str:
        """The reason for a method without scores; empty if it has some."""
        if not method.evaluated:
            return method.runs[0].evaluation_missing
        learned = any(run.name in self._runs for run in method.evaluated)
        return "" if learned else f"the group {self.group!r} did not learn in its runs"

    def named(self, condition: Condition) -> str:
        """The label of a condition; with its options, where several share the label."""
        key = (condition.kind, condition.label, condition.severity)
        namesakes = [c for c in self.conditions if (c.kind, c.label, c.severity) == key]
        if len(namesakes) < 2:
            return condition.label
        severities = ", ".join(f"{severity:g}" for severity in condition.levels)
        return f"{condition.label} ({severities or condition.options})"

    @property
    def envs(self) -> dict[str, list[MethodScores]]:
        """The scores of the methods of each training environment."""
        envs: dict[str, list[MethodScores]] = {}
        for scores in self.measured:
            envs.setdefault(scores.method.env, []).append(scores)
        return envs

    def mean(self, condition: Condition) -> float:
        """The mean score of the methods under a condition."""
        return float(
            np.mean([scores.mean(condition).value for scores in self.measured])
        )

    def of_kind(self, kind: ConditionKind) -> list[Condition]:
        """The conditions of one kind."""
        return [condition for condition in self.conditions if condition.kind == kind]

    def labels(self, kind: ConditionKind) -> list[str]:
        """The labels of the conditions of one kind."""
        return list(dict.fromkeys(condition.label for condition in self.of_kind(kind)))

    def levels(self, label: str) -> list[Condition]:
        """The levels of a perturbation by severity, without severity 0."""
        conditions = (
            condition for condition in self.of_kind("level") if condition.label == label
        )
        levels = [level for level in conditions if level.severity]
        return sorted(levels, key=lambda level: level.severity)

    def row(self, condition: Condition) -> pd.Series:
        """A row of the table under a level or in an environment, for its options."""
        mask = (self.rows["policy"] == TRAINED) & (self.rows["condition"] == condition)
        return self.rows[mask].iloc[0]

    def common(
        self, measured: Sequence[MethodScores], kind: ConditionKind
    ) -> list[Condition]:
        """The conditions of a kind that all of some methods were measured under.

        Of several areas of one label it is the one with the most severities, so that no
        perturbation counts twice.
        """
        condition_sets = [scores.conditions for scores in measured]
        shared = [
            condition
            for condition in self.of_kind(kind)
            if all(condition in conditions for conditions in condition_sets)
        ]
        if kind != "area":
            return shared
        longest: dict[str, Condition] = {}
        for condition in shared:
            previous = longest.get(condition.label, condition)
            longest[condition.label] = max(
                previous, condition, key=lambda area: len(area.levels)
            )
        return list(longest.values())

    def _measure(self, method: Method) -> MethodScores:
        runs = [run.name for run in method.evaluated if run.name in self._runs]
        # A condition counts if all runs of the method were measured under it.
        condition_samples, missing = {}, {}
        for condition in self.conditions:
            samples = [self._sample(run, condition) for run in runs]
            reasons = [sample for sample in samples if isinstance(sample, str)]
            if reasons:
                missing[condition] = reasons[0]
            else:
                condition_samples[condition] = samples
        # (runs, conditions, 3, episodes)
        episodes = np.stack(
            [np.stack(samples) for samples in condition_samples.values()], axis=1
        )
        weights = episode_resamples(episodes.shape[-1])
        scores = scores_of(method.name, episodes, weights)
        return MethodScores(method, tuple(condition_samples), scores, missing)

    def _sample(self, run: str, condition: Condition) -> np.ndarray | str:
        """Returns of a run under a condition, or the reason why there are none.

        Returns:
            ``(3, episodes)``: of the policy, and the returns that score 0 and 1.
        """
        if condition.kind == "area":
            return self._area_sample(run, condition)
        played = self._cells.get((run, TRAINED, condition), NOT_ASKED)
        if isinstance(played, str):
            return played
        if self.unit == "return":
            return np.stack([played, np.zeros_like(played), np.ones_like(played)])
        is_env = condition.kind == "environment"
        baselines = self._baselines(run, condition if is_env else UNPERTURBED)
        if not baselines:
            return "no random policy and better scripted policy in that environment"
        return np.stack([played, *baselines])

    def _area_sample(self, run: str, area: Condition) -> np.ndarray | str:
        """Means over severity, episode by episode."""
        tested = self._tested.get((run, area.label))
        # An area needs scores at severities that this run was tested at.
        if self.unit != "score":
            return "an area needs scores: returns of both baselines in this environment"
        if tested is None:
            return NOT_ASKED
        if area.levels[-1] == 0:
            return "an area needs a severity above 0"
        if not set(area.levels) <= set(tested):
            return f"its severities are others: {', '.join(map(str, tested))}"
        levels = []
        for severity in area.levels:
            level = Condition("level", area.label, severity)
            sample = self._sample(run, level if severity else UNPERTURBED)
            if isinstance(sample, str):
                return sample
            levels.append(sample)
        # The baselines always play in the unperturbed environment.
        return np.stack(
            [mean_over([sample[0] for sample in levels], area.levels), *levels[0][1:]]
        )

    def _baselines(self, run: str, env: Condition = UNPERTURBED) -> list[np.ndarray]:
        """Unperturbed returns of the random and the scripted policy.

        Empty unless the scripted policy is the better one.
        """
        cells = [self._cells.get((run, policy, env)) for policy in (RANDOM, HEURISTIC)]
        returns = [cell for cell in cells if isinstance(cell, np.ndarray)]
        better = len(returns) == 2 and returns[1].mean() > returns[0].mean()
        return returns if better else []


def group_scores(methods: Sequence[Method]) -> dict[str, GroupScores]:
    """The scores of each group of agents that learned, by its name."""
    table = _results_table(methods)
    groups = table["group"][table["policy"] == TRAINED].unique()
    return {group: GroupScores(methods, table, group) for group in groups}


def joint_provenance(measured: Sequence[MethodScores]) -> str:
    """The provenance of numbers that several methods share."""
    return "; ".join(scores.method.provenance for scores in measured)
