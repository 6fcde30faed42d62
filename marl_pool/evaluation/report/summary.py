"""The findings and the table at the head of the page; the missing values at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from marl_pool.envs.options import env_label
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.frame import AREA, ENVIRONMENT, LEVEL, shared_areas
from marl_pool.evaluation.report.methods import Method, recorded
from marl_pool.evaluation.report.sections import RETURN, scores_by_kind
from marl_pool.evaluation.results import CLEAN, TRAINED
from marl_pool.evaluation.statistics.scores import (
    INTERVAL_FROM,
    RANKED_FROM,
    joined,
    mean_score,
    over_seeds,
    rank,
)

LAST = 0.1
"""Final fraction of training over which the training return is averaged."""


def summary(methods: Sequence[Method], frame: pd.DataFrame) -> dict[str, Any]:
    """Return the variables of ``summary.html.j2``: runs, tests and findings."""
    episodes = [
        run.evaluation.record["episodes"]
        for method in methods
        for run in method.runs
        if run.evaluation
    ]
    return {
        "runs": sum(len(method.runs) for method in methods),
        "methods": len(methods),
        "kinds": list(dict.fromkeys(method.kind for method in methods)),
        "envs": len({method.env for method in methods}),
        "env": env_label(methods[0].runs[0].run.env),
        "groups": {
            group: {"episodes": episodes[0], **_findings(rows)}
            for group, rows in frame.groupby("group", sort=False)
        },
    }


def _findings(rows: pd.DataFrame) -> dict[str, Any]:
    # Only areas that all methods share enter the summary.
    areas = shared_areas(rows).groupby("label", sort=False)["score"].mean()
    # So do only conditions that some method was measured under.
    labels = rows[rows["reason"] == ""].groupby("test")["label"].nunique()
    return {
        "seeds": sorted(rows["seeds"].dropna().astype(int).unique()),
        "methods": rows["method"].nunique(),
        "perturbations": labels.get(LEVEL, 0),
        "environments": labels.get(ENVIRONMENT, 0),
        "unit": rows["unit"].iloc[0],
        "clean": rows["score"][rows["test"] == CLEAN].mean(),
        "areas": list(areas.sort_values(kind="stable").items()),
        "best": _best(rows),
    }


def _best(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the best two methods of each environment, or why they are not ranked."""
    best: list[dict[str, Any]] = []
    for env, env_rows in rows.groupby("env", sort=False):
        areas = shared_areas(env_rows)
        scores = scores_by_kind(areas)
        if len(scores) < 2:
            continue
        (first, second, *_), refusal = rank(scores)
        if refusal:
            best.append({"env": env, "refusal": refusal})
            continue
        low, high = first[1].low, second[1].high
        relation = "apart" if low > high else "within each other's intervals"
        if np.isnan([low, high]).any():
            relation = "without intervals it is unknown whether they are apart"
        best.append({"env": env, "places": [first, second], "relation": relation})
    return best


def overview(methods: Sequence[Method], rows: pd.DataFrame | None) -> html.PageSection:
    """Build the table with a row for each method, from the rows of a group, if any."""
    names = ["unperturbed return"]
    if rows is not None and rows["unit"].iloc[0] == "score":
        names += ["unperturbed score", "mean area"]
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
        reason = unmeasured(method, rows)
        record |= dict.fromkeys(names, html.missing_cell(reason))
        if rows is not None and not reason:
            method_rows = rows[rows["method"] == method.name]
            areas = shared_areas(rows)
            cells = [
                _return(method, rows["group"].iloc[0]),
                _score(method_rows[method_rows["test"] == CLEAN]),
                _score(areas[areas["method"] == method.name]),
            ]
            record |= zip(names, cells, strict=False)
        records.append(record)
    facts = {"ranked_from": RANKED_FROM}
    return html.PageSection("overview", [pd.DataFrame(records)], facts)


def unmeasured(method: Method, rows: pd.DataFrame | None) -> str:
    """Return why a method has no scores of a group; empty if it has some."""
    if rows is None or not method.evaluated:
        return method.runs[0].evaluation_missing
    if method.name in set(rows["method"]):
        return ""
    return f"the group {rows['group'].iloc[0]!r} did not learn in its runs"


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
    return html.missing_cell([*reasons, f"no {RETURN} in metrics.csv"][0])


def _return(method: Method, group: str) -> html.Cell:
    means = {}
    for run in method.evaluated:
        assert run.evaluation is not None
        rows = run.evaluation.rows
        clean = (rows["perturbation"] == CLEAN) & (rows["policy"] == TRAINED)
        clean &= (rows["group"] == group) & ~rows["stochastic"]
        row = rows[clean].iloc[0].to_dict()
        source = f"{run.relative(row['path'])}, commit {recorded(row, 'commit')}"
        returns = row["returns"]
        means[f"{source}, {len(returns)} episodes"] = float(returns.mean())
    return _mean(means)


def _mean(values: Mapping[str, float]) -> html.Cell:
    """Build the cell of a mean over runs, given by provenance; few are all shown."""
    texts = list(map(html.format_number, values.values()))
    title = "; ".join(
        f"{name}: {text}" for name, text in zip(values, texts, strict=True)
    )
    small = ", ".join(texts) if 1 < len(texts) < RANKED_FROM else ""
    mean = float(np.mean([*values.values()]))
    return html.Cell(html.format_number(mean), title, small=small)


def _score(rows: pd.DataFrame) -> html.Cell:
    """Build the cell of a mean score over conditions, with each seed or an interval."""
    if rows.empty:
        return html.missing_cell("no perturbation that all methods were measured under")
    scores = joined(rows["scores"])
    texts = [html.format_number(run.mean()) for run in scores.points]
    title = rows["provenance"].iloc[0]
    if AREA in set(rows["test"]):
        title = f"mean of {html.join_words(list(rows['label']))}; {title}"
    small = html.format_interval(over_seeds(scores, mean_score)) or "no interval"
    if len(texts) < RANKED_FROM:
        small = ", ".join(texts) if len(texts) >= INTERVAL_FROM else "one seed"
    return html.Cell(html.format_number(scores.points.mean()), title, small=small)


def missing_values(methods: Sequence[Method], frame: pd.DataFrame) -> html.PageSection:
    """Build the list of missing values with their reasons."""
    reasons = [
        f"{run.name}: {reason}"
        for method in methods
        for run in method.runs
        for reason in (run.evaluation_missing, run.metrics_missing)
        if reason
    ]
    for _, rows in frame.groupby("group", sort=False):
        reasons += [
            f"{method.name}: {unmeasured(method, rows)}"
            for method in methods
            if method.evaluated and unmeasured(method, rows)
        ]
        # Each reason is given once for each method, with all of its conditions.
        missing = rows[rows["reason"] != ""]
        for (method, reason), names in missing.groupby(
            ["method", "reason"], sort=False
        )["name"]:
            reasons.append(f"{method}, {', '.join(names.unique())}: {reason}")
    notes = [html.missing_note(reason) for reason in reasons]
    return html.PageSection("missing", [*notes] or [Markup("<p>Nothing.</p>")])
