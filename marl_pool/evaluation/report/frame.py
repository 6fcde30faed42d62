"""The scores of all methods under all conditions, in one tidy table."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER
from marl_pool.evaluation.statistics.intervals import episode_resamples
from marl_pool.evaluation.statistics.scores import (
    HEURISTIC,
    INTERVAL_FROM,
    RANDOM,
    mean_over,
    mean_score,
    over_seeds,
    scores_of,
    this_policy_only,
)

NOT_ASKED = "not in the suite of this evaluation"
NO_BASELINES = "no random policy and better scripted policy in that environment"
NO_AREA = "an area needs scores: returns of both baselines in this environment"
SEVERAL = "an area needs scores: a single group that learns"
LEVEL, AREA, ENVIRONMENT = "level", "area", "environment"
"""Kinds of tests besides `CLEAN`: one severity of a perturbation, the mean over its
severities, and another environment."""


class Condition(NamedTuple):
    """Identity of a condition, as columns of the frame.

    Attributes:
        test: `CLEAN`, `LEVEL`, `AREA` or `ENVIRONMENT`.
        label: label of the perturbation or the other environment.
        level: severity of a `LEVEL`.
        severities: severities of an `AREA`, including 0.
        variant: options of another environment, as JSON, since users choose labels.
    """

    test: str
    label: str = CLEAN
    level: float = 0.0
    severities: tuple[float, ...] = ()
    variant: str = ""


RunCondition = tuple[str, Condition]
Samples = dict[RunCondition, np.ndarray | str]
"""By run and condition, ``(3, episodes)`` returns of the policy and of those that score
0 and 1, or the reason why there are none."""


def scores_frame(methods: Sequence[Method]) -> pd.DataFrame:
    """Score all methods under all conditions.

    A score needs a random policy, a scripted one that is better, and a single group
    that learns, since the return of a baseline depends on the other groups. Without
    them the scores of a group are returns.

    Returns:
        A row for each combination of a group of agents that learned, a method that was
        evaluated in it, and a condition of any evaluation. Besides the fields of
        `Condition`:

        - ``group``, ``unit`` (``"score"`` or ``"return"``);
        - ``method`` (its name), ``kind``, ``env``, ``provenance``;
        - ``condition``, its number; areas come last;
        - ``name``, its label, with what differs where several share it;
        - ``perturbation``, ``options``, ``transfer_env``, as in the evaluation;
        - ``score``, ``low``, ``high``, the mean over seeds with its interval, which is
          over episodes for a single seed;
        - ``scores``, the `Scores` of its seeds, and ``seeds``, their number;
        - ``reason``, why a run of the method was not measured; empty if all were.
    """
    tables = [
        run.evaluation.rows.assign(run=run.name)
        for method in methods
        for run in method.runs
        if run.evaluation
    ]
    if not tables:
        return pd.DataFrame({"group": []})
    # Keep deterministic policies of groups that learn.
    table = pd.concat(tables, ignore_index=True)
    table = table[~table["stochastic"] & ~table["fixed"]]
    table = table.assign(condition=[_condition(row) for row in table.itertuples()])
    groups = table["group"][table["policy"] == TRAINED].unique()
    return pd.concat(
        [_group_frame(methods, table, group) for group in groups], ignore_index=True
    )


def shared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of conditions under which all methods were measured."""
    return rows[~rows["condition"].isin(rows["condition"][rows["reason"] != ""])]


def shared_areas(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the `shared` rows of areas.

    Of several areas with one label, only the one with the most severities is kept, so
    that no perturbation counts twice.
    """
    areas = shared(rows[rows["test"] == AREA])
    sizes = areas["severities"].map(len)
    longest = [
        areas[areas["condition"] == areas["condition"][sizes[labels].idxmax()]]
        for labels in areas.groupby("label", sort=False).groups.values()
    ]
    return pd.concat([areas[:0], *longest])


def _condition(row: Any) -> Condition:
    if row.perturbation == TRANSFER:
        options = json.dumps(row.transfer_env, sort_keys=True)
        return Condition(ENVIRONMENT, row.label, variant=options)
    if row.perturbation == CLEAN:
        return Condition(CLEAN)
    return Condition(LEVEL, row.label, row.severity)


def _group_frame(
    methods: Sequence[Method], table: pd.DataFrame, group: str
) -> pd.DataFrame:
    # Select the runs in which the group learned; in others it is scripted.
    trained = table[table["policy"] == TRAINED]
    learned = trained[trained["group"] == group]
    runs = learned["run"].unique()
    # A second group that learns makes the returns of the baselines ambiguous.
    alone = trained.groupby("run")["group"].nunique()[runs].max() == 1
    baselines = _baselines(table[table["group"] == group])
    scored = alone and all((run, Condition(CLEAN)) in baselines for run in runs)
    samples = _samples(learned, baselines if scored else None)
    reason = NO_AREA if alone else SEVERAL
    samples |= _areas(learned, samples, "" if scored else reason)

    # Make a row for each method and condition.
    conditions = list(dict.fromkeys(condition for _, condition in samples))
    columns = ["condition", "perturbation", "options", "transfer_env"]
    rows = learned.drop_duplicates("condition")[columns].to_dict("records")
    described = {row["condition"]: row for row in rows}
    weights = episode_resamples(len(learned["returns"].iloc[0]))
    records = []
    for method in methods:
        method_runs = [run.name for run in method.evaluated if run.name in runs]
        for number, condition in enumerate(conditions if method_runs else ()):
            parts = [samples.get((run, condition), NOT_ASKED) for run in method_runs]
            record = {
                **described.get(condition, {}),
                "group": group,
                "unit": "score" if scored else "return",
                "method": method.name,
                "kind": method.kind,
                "env": method.env,
                "provenance": method.provenance,
                "condition": number,
                "name": _name(condition, conditions),
                **condition._asdict(),
                **_measured(method.name, parts, weights),
            }
            records.append(record)
    return pd.DataFrame(records)


def _name(condition: Condition, conditions: Sequence[Condition]) -> str:
    """Return the label, with severities or options if several conditions share it."""
    namesakes = [namesake for namesake in conditions if namesake[:3] == condition[:3]]
    if len(namesakes) < 2:
        return condition.label
    levels = ", ".join(f"{severity:g}" for severity in condition.severities)
    return f"{condition.label} ({levels or condition.variant})"


def _measured(
    name: str, samples: Sequence[np.ndarray | str], weights: np.ndarray
) -> dict[str, Any]:
    """Return the columns of a method's scores under one condition, from its samples."""
    arrays = [sample for sample in samples if not isinstance(sample, str)]
    reasons = [sample for sample in samples if isinstance(sample, str)]
    if reasons:
        return {"reason": reasons[0]}
    scores = scores_of(name, np.stack(arrays)[:, None], weights)
    interval = this_policy_only if scores.seeds < INTERVAL_FROM else over_seeds
    numbers = interval(scores, mean_score)
    columns = zip(("score", "low", "high"), numbers, strict=True)
    return {**dict(columns), "scores": scores, "seeds": scores.seeds, "reason": ""}


def _samples(
    learned: pd.DataFrame, baselines: Mapping[RunCondition, list[np.ndarray]] | None
) -> Samples:
    """Collect a group's returns where it learned, with baselines if it is scored."""
    samples: Samples = {}
    for row in learned.itertuples():
        returns, condition = row.returns, row.condition
        place = condition if condition.test == ENVIRONMENT else Condition(CLEAN)
        pair = [np.zeros_like(returns), np.ones_like(returns)]
        if baselines is not None:
            pair = baselines.get((row.run, place), [])
        sample = np.stack([returns, *pair]) if pair else NO_BASELINES
        samples[row.run, condition] = row.missing or sample
    return samples


def _baselines(rows: pd.DataFrame) -> dict[RunCondition, list[np.ndarray]]:
    """Collect returns of the random and scripted policy where the latter is better."""
    played = rows[rows["missing"] == ""]
    columns = (played[name] for name in ("policy", "run", "condition", "returns"))
    returns = {
        (policy, run, condition): values
        for policy, run, condition, values in zip(*columns, strict=True)
    }
    return {
        (run, condition): [random, returns[HEURISTIC, run, condition]]
        for (policy, run, condition), random in returns.items()
        if policy == RANDOM
        and (HEURISTIC, run, condition) in returns
        and returns[HEURISTIC, run, condition].mean() > random.mean()
    }


def _areas(learned: pd.DataFrame, samples: Samples, missing: str) -> Samples:
    """Average over severity, episode by episode, for the severities of any run.

    ``missing`` says why there are no scores; empty if there are.
    """
    levels = learned[~learned["perturbation"].isin([CLEAN, TRANSFER])]
    tested = {
        key: tuple(sorted({0.0, *values}))
        for key, values in levels.groupby(["run", "label"], sort=False)["severity"]
    }
    return {
        (run, Condition(AREA, label, severities=severities)): (
            missing or _area(samples, run, label, severities, tested.get((run, label)))
        )
        for label, severities in dict.fromkeys(
            (label, severities) for (_, label), severities in tested.items()
        )
        for run in learned["run"].unique()
    }


def _area(
    samples: Samples,
    run: str,
    label: str,
    severities: tuple[float, ...],
    tested: tuple[float, ...] | None,
) -> np.ndarray | str:
    # An area needs scores at severities that this run was tested at.
    if tested is None:
        return NOT_ASKED
    if severities[-1] == 0:
        return "an area needs a severity above 0"
    if not set(severities) <= set(tested):
        return f"it was measured at other severities: {', '.join(map(str, tested))}"
    levels = []
    for severity in severities:
        level = Condition(LEVEL, label, severity) if severity else Condition(CLEAN)
        sample = samples.get((run, level), NOT_ASKED)
        if isinstance(sample, str):
            return sample
        levels.append(sample)
    # The baselines always play in the unperturbed environment.
    return np.stack(
        [mean_over([level[0] for level in levels], severities), *levels[0][1:]]
    )
