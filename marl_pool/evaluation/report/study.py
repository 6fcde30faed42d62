"""The numbers of a report: every condition of every method, with its draws."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from marl_pool.evaluation.comparison import (
    INTERVAL_FROM,
    Scores,
    mean_score,
    over_seeds,
    scores_of,
    this_policy_only,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.sources import Source
from marl_pool.evaluation.results import CLEAN, TRAINED, WORLD
from marl_pool.evaluation.scores import HEURISTIC, RANDOM, mean_over
from marl_pool.evaluation.statistics import Interval, episode_draws

Kind = Literal["clean", "rung", "area", "world"]


class Condition(NamedTuple):
    """What a number was measured under.

    Attributes:
        kind: the world as it is, one severity of a perturbation, the mean over all its
            severities, or another world.
        label: of the perturbation or the other world.
        severity: of a rung.
        ladder: of an area, the severities that it is over, 0 among them: areas over
            others are other numbers.
        world: of another world, its options as JSON: labels are a user's own.
    """

    kind: Kind
    label: str = CLEAN
    severity: float = 0.0
    ladder: tuple[float, ...] = ()
    world: str = ""


AS_IS = Condition("clean")
NOT_ASKED = "not in the suite of this evaluation"


@dataclass(frozen=True)
class Measured:
    """One method's numbers.

    Attributes:
        method: whose.
        conditions: those that all of its evaluated runs have, in order.
        scores: a column for each.
        gaps: why there is no number, by condition.
    """

    method: Method
    conditions: tuple[Condition, ...]
    scores: Scores
    gaps: Mapping[Condition, str] = field(default_factory=dict)

    def has(self, condition: Condition) -> bool:
        """Whether it was measured in all of the evaluated runs."""
        return condition in self.conditions

    def under(self, conditions: Sequence[Condition]) -> Scores:
        """The scores under some conditions that it has."""
        return self.scores.of([self.conditions.index(one) for one in conditions])

    def mean(self, condition: Condition) -> Interval:
        """Mean over seeds, with its interval; over episodes alone for a single seed."""
        own = self.under([condition])
        if own.seeds < INTERVAL_FROM:
            return this_policy_only(own, mean_score)
        return over_seeds(own, mean_score)

    def points(self, condition: Condition) -> list[float]:
        """The score of each seed."""
        return [float(point) for point in self.under([condition]).points[:, 0]]


class Study:
    """What the evaluations of some methods say of one group of agents.

    Args:
        methods: in order.
        group: which agents.
    """

    def __init__(self, methods: Sequence[Method], group: str) -> None:
        self.methods, self.group = list(methods), group
        tables = {
            source.run.path: _Table(source, group)
            for method in methods
            for source in method.evaluated
            if group in source.learned
        }
        self._tables = tables
        self.measured = [
            self._measure(method)
            for method in methods
            if method.evaluated and self._tables_of(method)
        ]

    def lacking(self, method: Method) -> str:
        """Why a method has no numbers here; empty if it has."""
        if not method.evaluated:
            return method.sources[0].gap
        no_group = f"the group {self.group!r} did not learn in its runs"
        return "" if self._tables_of(method) else no_group

    def _tables_of(self, method: Method) -> "list[_Table]":
        """Of its evaluated runs, which all learned the same groups."""
        paths = [source.run.path for source in method.evaluated]
        return [self._tables[path] for path in paths if path in self._tables]

    @cached_property
    def unit(self) -> str:
        """``"score"``, or ``"return"`` where no score is defined."""
        return "score" if all(t.scored for t in self._tables.values()) else "return"

    @cached_property
    def conditions(self) -> list[Condition]:
        """All conditions that any evaluation has, in order; areas come last."""
        tables = self._tables.values()
        every = dict.fromkeys(one for table in tables for one in table.conditions)
        return sorted(every, key=lambda one: one.kind == "area")

    @property
    def areas(self) -> list[Condition]:
        """The areas, of which a label has several if its ladders differ."""
        return [one for one in self.conditions if one.kind == "area"]

    def named(self, condition: Condition) -> str:
        """A condition's label, and what tells it apart where that is not enough."""
        same = [
            other
            for other in self.conditions
            if (other.kind, other.label, other.severity)
            == (condition.kind, condition.label, condition.severity)
        ]
        if len(same) < 2:
            return condition.label
        rungs = ", ".join(f"{severity:g}" for severity in condition.ladder)
        return f"{condition.label} ({rungs or condition.world})"

    @cached_property
    def worlds(self) -> list[str]:
        """The worlds that methods were trained in."""
        return list(dict.fromkeys(own.method.world for own in self.measured))

    def of_world(self, world: str) -> list[Measured]:
        """The methods that were trained in a world."""
        return [own for own in self.measured if own.method.world == world]

    def labels(self, kind: Kind) -> list[str]:
        """The labels of the conditions of one kind."""
        return list(dict.fromkeys(c.label for c in self.conditions if c.kind == kind))

    def severities(self, label: str) -> list[float]:
        """The rungs of a perturbation's ladder, clean left out."""
        rungs = (c for c in self.conditions if c.kind == "rung" and c.label == label)
        return sorted({rung.severity for rung in rungs})

    def row(self, condition: Condition) -> dict[str, Any]:
        """A row of results under a rung or in a world, for its options."""
        return next(
            row
            for table in self._tables.values()
            for row in table.rows.values()
            if _matches(row, condition)
        )

    def common(self, measured: Sequence[Measured], kind: Kind) -> list[Condition]:
        """The conditions of a kind that all of some methods have.

        Of several ladders of one label that with the most severities, so that no
        perturbation counts twice.
        """
        there = [
            one
            for one in self.conditions
            if one.kind == kind and all(own.has(one) for own in measured)
        ]
        if kind != "area":
            return there
        longest: dict[str, Condition] = {}
        for one in there:
            known = longest.get(one.label, one)
            longest[one.label] = max(known, one, key=lambda own: len(own.ladder))
        return list(longest.values())

    def _measure(self, method: Method) -> Measured:
        tables = self._tables_of(method)
        gaps = {
            one: next(t.gap(one, self.unit) for t in tables if t.gap(one, self.unit))
            for one in self.conditions
            if any(table.gap(one, self.unit) for table in tables)
        }
        there = tuple(one for one in self.conditions if one not in gaps)
        episodes = np.stack(
            [np.stack([t.episodes(one, self.unit) for one in there]) for t in tables]
        )
        scores = scores_of(method.name, episodes, episode_draws(episodes.shape[-1]))
        return Measured(method, there, scores, gaps)


class _Table:
    """One evaluation's returns by condition."""

    def __init__(self, source: Source, group: str) -> None:
        assert source.evaluation is not None
        self.returns = source.evaluation.returns
        # Of several groups that learn, what one's baseline gets depends on the others.
        self.alone = len(source.learned) == 1
        self.rows: dict[int, dict[str, Any]] = {}
        self.place: dict[tuple[str, Condition], int] = {}
        for place, row in enumerate(source.evaluation.rows):
            if row["group"] == group and not row["stochastic"] and not row["fixed"]:
                self.rows[place] = row
                self.place[row["policy"], _condition(row)] = place

    @cached_property
    def scored(self) -> bool:
        """Whether its scripted policy is better than its random one."""
        ends = [self.place.get((policy, AS_IS)) for policy in (RANDOM, HEURISTIC)]
        if not self.alone or any(end is None for end in ends):
            return False
        random, scripted = (self.returns[end].mean() for end in ends)
        return bool(scripted > random)

    @cached_property
    def conditions(self) -> list[Condition]:
        """All that were asked for, areas after the rungs."""
        own = [one for policy, one in self.place if policy == TRAINED]
        labels = dict.fromkeys(one.label for one in own if one.kind == "rung")
        return [*own, *map(self._area, labels)]

    def _area(self, label: str) -> Condition:
        """Over all severities of a perturbation, from clean on."""
        severities = {0.0} | {
            one.severity
            for policy, one in self.place
            if policy == TRAINED and one.kind == "rung" and one.label == label
        }
        return Condition("area", label, ladder=tuple(sorted(severities)))

    def gap(self, condition: Condition, unit: str) -> str:
        """Why there is no number; empty if there is one."""
        if condition.kind == "area":
            return self._area_gap(condition, unit)
        place = self.place.get((TRAINED, condition))
        if place is None:
            return NOT_ASKED
        if self.rows[place]["gap"]:
            return str(self.rows[place]["gap"])
        if unit == "score" and not self._yardstick(condition):
            return "no random and scripted policy, the better one, in that world"
        return ""

    def _area_gap(self, condition: Condition, unit: str) -> str:
        if unit != "score":
            return "an area needs scores: returns of both baselines in this world"
        own = self._area(condition.label)
        if own not in self.conditions:
            return NOT_ASKED
        if condition.ladder[-1] == 0:
            return "an area needs a severity above 0"
        if not set(condition.ladder) <= set(own.ladder):
            return f"its severities are others: {', '.join(map(str, own.ladder))}"
        rungs = _rungs(condition)
        return next(filter(None, (self.gap(rung, unit) for rung in rungs)), "")

    def episodes(self, condition: Condition, unit: str) -> np.ndarray:
        """``(3, episodes)``: what was played, and what 0 and 1 are."""
        if condition.kind == "area":
            rungs = [self._returns(TRAINED, rung) for rung in _rungs(condition)]
            played = mean_over(rungs, condition.ladder)
        else:
            played = self._returns(TRAINED, condition)
        if unit == "return":
            return np.stack([played, np.zeros_like(played), np.ones_like(played)])
        return np.stack([played, *self._yardstick(condition)])

    def _yardstick(self, condition: Condition) -> list[np.ndarray]:
        """Returns of both baselines in the unperturbed world; empty without them."""
        world = condition if condition.kind == "world" else AS_IS
        if any((policy, world) not in self.place for policy in (RANDOM, HEURISTIC)):
            return []
        random, scripted = (self._returns(name, world) for name in (RANDOM, HEURISTIC))
        return [random, scripted] if scripted.mean() > random.mean() else []

    def _returns(self, policy: str, condition: Condition) -> np.ndarray:
        returns: np.ndarray = self.returns[self.place[policy, condition]]
        return returns


def groups_of(methods: Sequence[Method]) -> list[str]:
    """The groups of agents that learned."""
    sources = (source for method in methods for source in method.evaluated)
    return list(dict.fromkeys(group for own in sources for group in own.learned))


def _rungs(area: Condition) -> list[Condition]:
    """What an area is over."""
    return [
        Condition("rung", area.label, severity) if severity else AS_IS
        for severity in area.ladder
    ]


def _condition(row: Mapping[str, Any]) -> Condition:
    if row["perturbation"] == CLEAN:
        return AS_IS
    if row["perturbation"] == WORLD:
        options = json.dumps(row["world"], sort_keys=True)
        return Condition("world", row["label"], world=options)
    return Condition("rung", row["label"], row["severity"])


def _matches(row: Mapping[str, Any], condition: Condition) -> bool:
    return row["policy"] == TRAINED and _condition(row) == condition
