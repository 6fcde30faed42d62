"""The findings and the table at the head of the page; the missing values at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.group_scores import (
    UNPERTURBED,
    Condition,
    GroupScores,
    MethodScores,
)
from marl_pool.evaluation.report.methods import Method, recorded
from marl_pool.evaluation.report.sections import RETURN
from marl_pool.evaluation.results import TRAINED
from marl_pool.evaluation.statistics.scores import (
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
        "env": methods[0].runs[0].run.env["name"].rpartition(":")[2],
        "ranked_from": RANKED_FROM,
        "groups": {name: _findings(group) for name, group in groups.items()},
    }


def _findings(group: GroupScores) -> dict[str, Any]:
    evaluation = group.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    # Only areas that all methods share enter the summary.
    areas = {
        area.label: group.mean(area) for area in group.common(group.measured, "area")
    }
    return {
        "seeds": sorted(
            {method_scores.scores.seeds for method_scores in group.measured}
        ),
        "methods": len(group.measured),
        "episodes": evaluation.record["episodes"],
        "perturbations": len(group.labels("area")),
        "environments": len(group.labels("environment")),
        "unit": group.unit,
        "clean": group.mean(UNPERTURBED),
        "areas": sorted(areas.items(), key=lambda area: area[1]),
        "best": [best for env in group.envs for best in _best_two(group, env)],
    }


def _best_two(group: GroupScores, env: str) -> list[dict[str, Any]]:
    """The best two methods of a training environment, if methods are ranked."""
    measured = group.envs[env]
    areas = group.common(measured, "area")
    fewest = min(method_scores.scores.seeds for method_scores in group.measured)
    if len(measured) < 2 or not areas or fewest < RANKED_FROM:
        return []
    ranking = rank({scores.method.kind: scores.under(areas) for scores in measured})
    first, second = ranking.places[:2]
    low, high = first[1].low, second[1].high
    relation = "apart" if low > high else "within each other's intervals"
    if np.isnan([low, high]).any():
        relation = "without intervals it is unknown if they are apart"
    return [{"env": env, "places": [first, second], "relation": relation}]


def overview(methods: Sequence[Method], group: GroupScores | None) -> html.PageSection:
    """Build the table with a row for each method."""
    # Select the scores, and the areas that all methods share.
    measured = (
        {scores.method.name: scores for scores in group.measured} if group else {}
    )
    areas = group.common(group.measured, "area") if group else []
    records = []
    for method in methods:
        seeds = [f"{run.seed} of {run.name}/config.yaml" for run in method.runs]
        title = f"training seeds {', '.join(seeds)}"
        record = {
            "method": html.Cell(method.name),
            "seeds": html.Cell(str(len(method.runs)), title),
            "training return": _training(method),
        }
        # A method without scores has the reason in their place.
        reason = group.missing(method) if group else method.runs[0].evaluation_missing
        names = ["unperturbed return"]
        if group and group.unit == "score":
            names += ["unperturbed score", "mean area"]
        record |= dict.fromkeys(names, html.missing(reason))
        if group and (scores := measured.get(method.name)):
            cells = [_return(group, method), _score(scores, [UNPERTURBED])]
            record |= zip(names, [*cells, _score(scores, areas)], strict=False)
        records.append(record)
    facts = {"ranked_from": RANKED_FROM}
    return html.PageSection("overview", [pd.DataFrame(records)], facts)


def _training(method: Method) -> html.Cell:
    ends = {}
    for run in method.runs:
        # Logged rows may lack the return, such as those before the first episode's end.
        rows = run.metrics.tail(max(1, round(LAST * len(run.metrics))))
        last = rows.reindex(columns=[RETURN])[RETURN].dropna()
        if len(last):
            file = run.relative(run.run.metrics_path)
            ends[f"{file}, mean of its last {len(last)} rows"] = float(last.mean())
    if ends:
        return _mean(ends)
    reasons = [run.metrics_missing for run in method.runs if run.metrics_missing]
    return html.missing([*reasons, f"no {RETURN} in metrics.csv"][0])


def _return(group: GroupScores, method: Method) -> html.Cell:
    clean = group.rows["condition"] == UNPERTURBED
    rows = group.rows[clean & (group.rows["policy"] == TRAINED)].set_index("run")
    means = {}
    for run in method.evaluated:
        path, returns = rows.loc[run.name, ["path", "returns"]]
        commit = recorded(run.evaluation.record if run.evaluation else {}, "commit")
        source = f"{run.relative(path)}, commit {commit}, {len(returns)} episodes"
        means[source] = float(returns.mean())
    return _mean(means)


def _mean(values: Mapping[str, float]) -> html.Cell:
    """The mean of one number per run, by provenance; each, where seeds are few."""
    texts = list(map(html.number, values.values()))
    title = "; ".join(
        f"{name}: {text}" for name, text in zip(values, texts, strict=True)
    )
    small = ", ".join(texts) if 1 < len(texts) < RANKED_FROM else ""
    mean = float(np.mean([*values.values()]))
    return html.Cell(html.number(mean), title, small=small)


def _score(method_scores: MethodScores, conditions: Sequence[Condition]) -> html.Cell:
    """The mean score over some conditions, with each seed or an interval."""
    if not conditions:
        return html.missing("no perturbation that all methods were measured under")
    scores = method_scores.under(conditions)
    texts = [html.number(run.mean()) for run in scores.points]
    title = method_scores.method.provenance
    if UNPERTURBED not in conditions:
        labels = html.listed([condition.label for condition in conditions])
        title = f"mean of {labels}; {title}"
    small = html.span(over_seeds(scores, mean_score)) or "no interval"
    if len(texts) < RANKED_FROM:
        small = ", ".join(texts) if len(texts) >= INTERVAL_FROM else "one seed"
    return html.Cell(html.number(scores.points.mean()), title, small=small)


def missing_values(
    methods: Sequence[Method], groups: Sequence[GroupScores]
) -> html.PageSection:
    """Build the list of missing values with their reasons."""
    reasons = [
        f"{run.name}: {reason}"
        for method in methods
        for run in method.runs
        for reason in (run.evaluation_missing, run.metrics_missing)
        if reason
    ]
    for group in groups:
        reasons += [
            f"{method.name}: {group.missing(method)}"
            for method in methods
            if method.evaluated and group.missing(method)
        ]
        # Each reason is given once for each method, with all of its conditions.
        for scores in group.measured:
            frame = pd.DataFrame(
                scores.missing.items(), columns=["condition", "reason"]
            )
            for reason, rows in frame.groupby("reason", sort=False):
                names = dict.fromkeys(map(group.named, rows["condition"]))
                reasons.append(f"{scores.method.name}, {', '.join(names)}: {reason}")
    notes = [html.missing_note(reason) for reason in reasons]
    return html.PageSection("missing", [*notes] or [Markup("<p>Nothing.</p>")])
