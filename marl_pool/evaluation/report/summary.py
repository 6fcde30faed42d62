"""The findings and the table at the head of the page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_pool.evaluation.report.components import (
    PageSection,
    Table,
    TableCell,
    listed,
    missing,
    number,
    span,
)
from marl_pool.evaluation.report.group_scores import GroupScores, MethodScores
from marl_pool.evaluation.report.learning_curves import RETURN
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.provenance import recorded
from marl_pool.evaluation.report.table import UNPERTURBED, Condition
from marl_pool.evaluation.results import TRAINED
from marl_pool.evaluation.statistics.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    mean_score,
    over_seeds,
    rank,
)

LAST = 0.1
"""Fraction of the training at its end that gives the training return."""


def summary(
    methods: Sequence[Method], groups: Mapping[str, GroupScores]
) -> dict[str, Any]:
    """Variables of ``summary.html.j2``: what was trained, tested and found."""
    return {
        "runs": sum(len(method.runs) for method in methods),
        "methods": len(methods),
        "kinds": list(dict.fromkeys(method.kind for method in methods)),
        "envs": len({method.env for method in methods}),
        "env": methods[0].runs[0].run.config["env"]["name"].rpartition(":")[2],
        "ranked_from": RANKED_FROM,
        "groups": {name: _findings(group) for name, group in groups.items()},
    }


def _findings(group: GroupScores) -> dict[str, Any]:
    def average(condition: Condition) -> float:
        return float(np.mean([own.mean(condition).value for own in group.measured]))

    evaluation = group.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    areas = {one.label: average(one) for one in group.common(group.measured, "area")}
    return {
        "seeds": sorted({own.scores.seeds for own in group.measured}),
        "methods": len(group.measured),
        "episodes": evaluation.about["episodes"],
        "perturbations": len(group.labels("area")),
        "environments": len(group.labels("environment")),
        "unit": group.unit,
        "clean": average(UNPERTURBED),
        "areas": sorted(areas.items(), key=lambda area: area[1]),
        "best": [best for env in group.envs for best in _best_two(group, env)],
    }


def _best_two(group: GroupScores, env: str) -> list[dict[str, Any]]:
    """The best two methods of a training environment, if methods are ranked."""
    own = group.of_env(env)
    areas = group.common(own, "area")
    fewest = min(one.scores.seeds for one in group.measured)
    if len(own) < 2 or not areas or fewest < RANKED_FROM:
        return []
    ranking = rank({one.method.kind: one.under(areas) for one in own})
    (name, first), (second, its) = ranking.places[:2]
    bounds = [first.low, its.high]
    relation = "apart" if first.low > its.high else "within each other's intervals"
    if np.isnan(bounds).any():
        relation = "without intervals it is unknown if they are apart"
    return [
        {"env": env, "places": [(name, first), (second, its)], "relation": relation}
    ]


def overview(methods: Sequence[Method], group: GroupScores | None) -> PageSection:
    """Build the table with a row for each method."""
    measured = {own.method.name: own for own in group.measured} if group else {}
    areas = group.common(group.measured, "area") if group else []
    head = ["method", "seeds", "training return", "unperturbed return"]
    if group and group.unit == "score":
        head += ["unperturbed score", "mean area"]
    lines = []
    for method in methods:
        line = [TableCell(method.name), _seeds(method), _training(method)]
        if group is None or method.name not in measured:
            bare = method.runs[0].evaluation_missing
            reason = group.missing(method) if group else bare
            line += [missing(reason)] * (len(head) - len(line))
        else:
            own = measured[method.name]
            line += [_return(group, method)]
            if group.unit == "score":
                line += [_score(own, [UNPERTURBED]), _score(own, areas)]
        lines.append(line)
    facts = {"ranked_from": RANKED_FROM}
    return PageSection("overview", [Table(head, lines)], facts)


def _seeds(method: Method) -> TableCell:
    names = ", ".join(f"{one.seed} of {one.name}/config.yaml" for one in method.runs)
    return TableCell(str(len(method.runs)), f"training seeds {names}")


def _training(method: Method) -> TableCell:
    ends = {}
    for one in method.runs:
        rows = one.metrics.tail(max(1, round(LAST * len(one.metrics))))
        last = rows.get(RETURN, np.empty(0))
        last = np.asarray(last)[~np.isnan(last)]
        if len(last):
            file = one.relative(one.run.metrics_path)
            ends[f"{file}, mean of its last {len(last)} rows"] = float(last.mean())
    if ends:
        return _mean(ends)
    reasons = (one.metrics_missing for one in method.runs)
    return missing(next(filter(None, reasons), f"no {RETURN} in metrics.csv"))


def _return(group: GroupScores, method: Method) -> TableCell:
    rows = group.rows[
        (group.rows["method"] == method.name)
        & (group.rows["policy"] == TRAINED)
        & (group.rows["condition"] == UNPERTURBED)
    ].set_index("run")
    means = {}
    for one in method.evaluated:
        assert one.evaluation is not None
        row, commit = rows.loc[one.name], recorded(one.evaluation.about, "commit")
        source = f"{one.relative(row['path'])}, commit {commit}"
        means[f"{source}, {len(row['returns'])} episodes"] = row["returns"].mean()
    return _mean(means)


def _mean(values: Mapping[str, float]) -> TableCell:
    """The mean of one number per run, by provenance; each, where seeds are few."""
    each = list(map(number, values.values()))
    title = "; ".join(f"{name}: {one}" for name, one in zip(values, each, strict=True))
    small = ", ".join(each) if 1 < len(each) < RANKED_FROM else ""
    return TableCell(number(float(np.mean(list(values.values())))), title, small=small)


def _score(own: MethodScores, conditions: Sequence[Condition]) -> TableCell:
    """The mean score over some conditions, with each seed or an interval."""
    if not conditions:
        return missing("no perturbation that all methods were measured under")
    scores = own.under(conditions)
    each = [number(float(run.mean())) for run in scores.points]
    title = own.provenance
    if UNPERTURBED not in conditions:
        title = f"mean of {listed([one.label for one in conditions])}; {title}"
    small = span(over_seeds(scores, mean_score)) or "no interval"
    if len(each) < RANKED_FROM:
        small = ", ".join(each) if len(each) >= INTERVAL_FROM else "one seed"
    return TableCell(number(float(scores.points.mean())), title, small=small)
