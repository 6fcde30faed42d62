"""Scores of all methods under all conditions, for one group of agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.provenance import provenance_of
from marl_pool.evaluation.report.table import (
    UNPERTURBED,
    Condition,
    ConditionKind,
    level,
    results_table,
)
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER
from marl_pool.evaluation.statistics.comparison import (
    INTERVAL_FROM,
    Scores,
    mean_score,
    over_seeds,
    scores_of,
    this_policy_only,
)
from marl_pool.evaluation.statistics.intervals import Interval, episode_draws
from marl_pool.evaluation.statistics.scores import HEURISTIC, RANDOM, mean_over

NOT_ASKED = "not in the suite of this evaluation"


@dataclass(frozen=True)
class MethodScores:
    """The scores of one method; returns, where no score is defined.

    Attributes:
        method: their method.
        conditions: those that all of its evaluated runs were measured under, in order.
        scores: with a column for each condition.
        missing: the reason why there is no number, by condition.
        provenance: seeds, episodes, commit and files, for tooltips.
    """

    method: Method
    conditions: tuple[Condition, ...]
    scores: Scores
    missing: Mapping[Condition, str]
    provenance: str

    def has(self, condition: Condition) -> bool:
        """True if all of its evaluated runs were measured under the condition."""
        return condition in self.conditions

    def under(self, conditions: Sequence[Condition]) -> Scores:
        """The scores under some of its conditions."""
        return self.scores.of([self.conditions.index(one) for one in conditions])

    def mean(self, condition: Condition) -> Interval:
        """Mean and interval over seeds; of a single seed the interval over episodes."""
        own = self.under([condition])
        interval = this_policy_only if own.seeds < INTERVAL_FROM else over_seeds
        return interval(own, mean_score)

    def points(self, condition: Condition) -> list[float]:
        """The score of each seed."""
        return [float(point) for point in self.under([condition]).points[:, 0]]


class GroupScores:
    """The scores of one group of agents, computed from the table of results.

    Args:
        methods: in order.
        table: from `results_table`.
        group: of agents that learned.

    Attributes:
        unit: ``"score"``, or ``"return"`` where no score is defined: scores need a
            random policy, a scripted one that is better, and a single group that
            learns, since the return of a baseline depends on the other groups.
        conditions: all conditions of any evaluation, in order; areas come last.
        measured: the scores of the methods that have an evaluation of the group.
    """

    def __init__(
        self, methods: Sequence[Method], table: pd.DataFrame, group: str
    ) -> None:
        # Rows of the group in the runs in which it learned, and its levels by label.
        self.group = group
        trained = table[table["policy"] == TRAINED]
        learned = trained[trained["group"] == group]
        own = table[(table["group"] == group) & table["run"].isin(learned["run"])]
        self.rows = own
        cells = zip(own["run"], own["policy"], own["condition"], strict=True)
        self._cells = dict(zip(cells, own.itertuples(), strict=True))
        levels = learned[~learned["perturbation"].isin([CLEAN, TRANSFER])]
        self._severities = {
            (run, label): tuple(sorted({0.0, *part["severity"]}))
            for (run, label), part in levels.groupby(["run", "label"], sort=False)
        }
        areas = [
            Condition("area", label, levels=severities)
            for (_, label), severities in self._severities.items()
        ]
        self.conditions = list(dict.fromkeys([*learned["condition"], *areas]))
        # The unit: a second group that learns makes the baselines ambiguous.
        alone = trained.groupby("run")["group"].nunique() == 1
        scored = (
            alone[run] and self._baselines(run, UNPERTURBED)
            for run in learned["run"].unique()
        )
        self.unit = "score" if all(scored) else "return"
        self._learned = set(learned["run"])
        self.measured = [
            self._measure(method) for method in methods if self._runs(method)
        ]

    def missing(self, method: Method) -> str:
        """The reason for a method without scores; empty if it has some."""
        if not method.evaluated:
            return method.runs[0].evaluation_missing
        no_group = f"the group {self.group!r} did not learn in its runs"
        return "" if self._runs(method) else no_group

    def named(self, condition: Condition) -> str:
        """The label of a condition; with its options, where several share the label."""
        key = (condition.kind, condition.label, condition.severity)
        same = [c for c in self.conditions if (c.kind, c.label, c.severity) == key]
        if len(same) < 2:
            return condition.label
        severities = ", ".join(f"{severity:g}" for severity in condition.levels)
        return f"{condition.label} ({severities or condition.options})"

    @cached_property
    def envs(self) -> list[str]:
        """Training environments of the methods."""
        return list(dict.fromkeys(own.method.env for own in self.measured))

    def of_env(self, env: str) -> list[MethodScores]:
        """The scores of the methods that were trained in an environment."""
        return [own for own in self.measured if own.method.env == env]

    def of_kind(self, kind: ConditionKind) -> list[Condition]:
        """The conditions of one kind."""
        return [one for one in self.conditions if one.kind == kind]

    def labels(self, kind: ConditionKind) -> list[str]:
        """The labels of the conditions of one kind."""
        return list(dict.fromkeys(one.label for one in self.of_kind(kind)))

    def levels(self, label: str) -> list[Condition]:
        """The levels of a perturbation by severity, without severity 0."""
        severities = {c.severity for c in self.of_kind("level") if c.label == label}
        return [level(label, severity) for severity in sorted(severities) if severity]

    def row(self, condition: Condition) -> pd.Series:
        """A row of the table under a level or in an environment, for its options."""
        rows = self.rows[self.rows["policy"] == TRAINED]
        return rows[[one == condition for one in rows["condition"]]].iloc[0]

    def common(
        self, measured: Sequence[MethodScores], kind: ConditionKind
    ) -> list[Condition]:
        """The conditions of a kind that all of some methods were measured under.

        Of several areas of one label it is the one with the most severities, so that no
        perturbation counts twice.
        """
        found = [c for c in self.of_kind(kind) if all(own.has(c) for own in measured)]
        if kind != "area":
            return found
        longest: dict[str, Condition] = {}
        for one in found:
            known = longest.get(one.label, one)
            longest[one.label] = max(known, one, key=lambda area: len(area.levels))
        return list(longest.values())

    def _runs(self, method: Method) -> list[str]:
        return [one.name for one in method.evaluated if one.name in self._learned]

    def _measure(self, method: Method) -> MethodScores:
        there, missing = {}, {}
        for one in self.conditions:
            samples = [self._sample(run, one) for run in self._runs(method)]
            reasons = [sample for sample in samples if isinstance(sample, str)]
            if reasons:
                missing[one] = reasons[0]
            else:
                there[one] = samples
        # (runs, conditions, 3, episodes)
        episodes = np.stack([np.stack(own) for own in there.values()], axis=1)
        draws = episode_draws(episodes.shape[-1])
        scores = scores_of(method.name, episodes, draws)
        return MethodScores(
            method, tuple(there), scores, missing, provenance_of(method)
        )

    def _sample(self, run: str, condition: Condition) -> np.ndarray | str:
        """Returns of a run under a condition, or the reason why there are none.

        Returns:
            ``(3, episodes)``: of the policy, and the returns that score 0 and 1.
        """
        if condition.kind == "area":
            return self._area_sample(run, condition)
        cell = self._cells.get((run, TRAINED, condition))
        if cell is None:
            return NOT_ASKED
        if cell.missing:
            return str(cell.missing)
        if self.unit == "return":
            return np.stack(
                [cell.returns, np.zeros_like(cell.returns), np.ones_like(cell.returns)]
            )
        baselines = self._baselines(run, condition)
        if not baselines:
            return "no random policy and better scripted policy in that environment"
        return np.stack([cell.returns, *baselines])

    def _area_sample(self, run: str, area: Condition) -> np.ndarray | str:
        """Means over severity, episode by episode."""
        if self.unit != "score":
            return "an area needs scores: returns of both baselines in this environment"
        tested = self._severities.get((run, area.label))
        if tested is None:
            return NOT_ASKED
        if area.levels[-1] == 0:
            return "an area needs a severity above 0"
        if not set(area.levels) <= set(tested):
            return f"its severities are others: {', '.join(map(str, tested))}"
        samples = []
        for severity in area.levels:
            sample = self._sample(run, level(area.label, severity))
            if isinstance(sample, str):
                return sample
            samples.append(sample)
        played = mean_over([sample[0] for sample in samples], area.levels)
        return np.stack([played, *samples[0][1:]])

    def _baselines(self, run: str, condition: Condition) -> list[np.ndarray]:
        """Unperturbed returns of the random and the scripted policy.

        Empty unless the scripted policy is the better one.
        """
        env = condition if condition.kind == "environment" else UNPERTURBED
        cells = [self._cells.get((run, policy, env)) for policy in (RANDOM, HEURISTIC)]
        returns = [cell.returns for cell in cells if cell is not None]
        better = len(returns) == 2 and returns[1].mean() > returns[0].mean()
        return returns if better else []


def group_scores(methods: Sequence[Method]) -> dict[str, GroupScores]:
    """The scores of each group of agents that learned, by its name."""
    table = results_table(methods)
    groups = table["group"][table["policy"] == TRAINED].unique()
    return {group: GroupScores(methods, table, group) for group in groups}
