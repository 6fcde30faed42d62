"""The tidy table of a report: one row per run, policy and condition."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import CLEAN, TRANSFER

ConditionKind = Literal["clean", "level", "area", "environment"]


@dataclass(frozen=True)
class Condition:
    """The condition that a number was measured under.

    Attributes:
        kind: unperturbed, one severity of a perturbation, the mean over its severities,
            or another environment.
        label: of the perturbation or the other environment.
        severity: of a level.
        levels: of an area, its severities, 0 included; areas over other severities are
            other conditions.
        options: of another environment, its options as JSON, since labels are chosen
            by users.
    """

    kind: ConditionKind
    label: str = CLEAN
    severity: float = 0.0
    levels: tuple[float, ...] = ()
    options: str = ""


UNPERTURBED = Condition("clean")


def results_table(methods: Sequence[Method]) -> pd.DataFrame:
    """Concatenate the evaluations of all runs.

    Returns:
        One row per run, policy and condition, of deterministic policies of groups that
        learn: the columns of `Evaluation.rows` and ``method`` (its name), ``run`` (its
        name), ``seed`` (of the training) and ``condition``. The returns of a row are
        paired, episode by episode, with those of all other rows.
    """
    parts = [
        one.evaluation.rows.assign(method=method.name, run=one.name, seed=one.seed)
        for method in methods
        for one in method.evaluated
        if one.evaluation
    ]
    if not parts:
        return pd.DataFrame(columns=["group", "policy", "run"])
    table = pd.concat(parts, ignore_index=True)
    table = table[~table["stochastic"] & ~table["fixed"]]
    return table.assign(condition=[_condition(row) for row in table.itertuples()])


def level(label: str, severity: float) -> Condition:
    """A perturbation at one severity; the unperturbed condition at 0."""
    return Condition("level", label, severity) if severity else UNPERTURBED


def _condition(row: Any) -> Condition:
    if row.perturbation == CLEAN:
        return UNPERTURBED
    if row.perturbation == TRANSFER:
        options = json.dumps(row.transfer_env, sort_keys=True)
        return Condition("environment", row.label, options=options)
    return Condition("level", row.label, row.severity)
