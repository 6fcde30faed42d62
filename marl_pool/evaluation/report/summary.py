"""The three sentences and the table at the head of the page."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    mean_score,
    over_seeds,
    rank,
)
from marl_pool.evaluation.report.components import (
    PageSection,
    Table,
    TableCell,
    counted,
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
from marl_pool.evaluation.statistics import Interval

LAST = 0.1
"""Share of the training whose episodes count as its end."""


def summary(methods: Sequence[Method], groups: Mapping[str, GroupScores]) -> str:
    """Summarise the training, the perturbations and the comparison in a sentence each.

    With several groups of agents each has a second and a third sentence.
    """
    runs = sum(len(method.runs) for method in methods)
    env = methods[0].runs[0].run.config["env"]["name"].rpartition(":")[2]
    worlds = len({method.world for method in methods})
    where = f", in {worlds} worlds" if worlds > 1 else ""
    kinds = listed(list(dict.fromkeys(method.kind for method in methods)))
    trained = (
        f"{counted(runs, 'run')} of {counted(len(methods), 'method')} ({kinds}{where}) "
        f"learned {env}"
    )
    if not groups:
        return (
            f"{trained}. None of them has an evaluation that counts, so nothing is "
            "known of how they behave under perturbation. The learning curves below "
            "are of training episodes."
        )
    sentences = [f"{trained}, {_tested(next(iter(groups.values())))}."]
    for name, group in groups.items():
        prefix = f"As for {name}: " if len(groups) > 1 else ""
        sentences.append(f"{prefix}{_costs(group)} {_conclusion(group)}")
    return " ".join(sentences)


def _tested(group: GroupScores) -> str:
    evaluation = group.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    seeds = sorted({own.scores.seeds for own in group.measured})
    several = f"{seeds[0]} to {seeds[-1]} seeds"
    perturbations = counted(len(group.labels("area")), "perturbation")
    worlds = len(group.labels("environment"))
    others = f" and {counted(worlds, 'other world')}" if worlds else ""
    return (
        f"{several if len(seeds) > 1 else counted(seeds[0], 'seed')} each, and were "
        f"tested in {evaluation.about['episodes']} episodes a condition, under "
        f"{perturbations}{others}"
    )


def _costs(group: GroupScores) -> str:
    """The perturbations that cost most and least, averaged over methods."""

    def average(condition: Condition) -> float:
        return float(np.mean([own.mean(condition).value for own in group.measured]))

    clean = number(average(UNPERTURBED))
    means = {one.label: average(one) for one in group.common(group.measured, "area")}
    if not means:
        return f"Unperturbed, their mean {group.unit} is {clean}."
    worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    text = (
        f"Unperturbed they score {clean} on average (0 is random, 1 the "
        f"scripted policy), and {worst} costs most: {number(means[worst])} is left, "
        "averaged over its severities"
    )
    return text + ("." if worst == best else f"; {best} leaves {number(means[best])}.")


def _conclusion(group: GroupScores) -> str:
    """The best two methods, or the reason why methods are not ranked."""
    if group.unit != "score":
        return "No score is defined in this world, so methods are not compared."
    if len(group.measured) < 2:
        return "There is one method, so there is nothing to rank."
    fewest = min(own.scores.seeds for own in group.measured)
    if fewest < RANKED_FROM:
        return (
            f"With {counted(fewest, 'seed')} of a method no order of the methods is "
            f"claimed ({RANKED_FROM} are needed): the page shows each seed instead."
        )
    return " ".join(filter(None, (_best(group, world) for world in group.worlds)))


def _best(group: GroupScores, world: str) -> str:
    own = group.of_world(world)
    areas = group.common(own, "area")
    if len(own) < 2 or not areas:
        return ""
    places = rank({one.method.kind: one.under(areas) for one in own}).places
    (name, value), (second, its) = places[:2]
    where = f"In {world}, {name}" if world else name[0].upper() + name[1:]
    return (
        f"{where} keeps most, {_with_span(value)}, before {second} with "
        f"{_with_span(its)}: {_separation(value, its)}."
    )


def _with_span(value: Interval) -> str:
    return f"{number(value.value)} ({span(value) or 'no interval'})"


def _separation(first: Interval, second: Interval) -> str:
    if math.isnan(first.low) or math.isnan(second.low):
        return "without intervals it is unknown if they are apart"
    return "apart" if first.low > second.high else "within each other's intervals"


def overview(
    methods: Sequence[Method], group: GroupScores | None, suffix: str
) -> PageSection:
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
    return PageSection("overview", [Table(head, lines)], facts, suffix)


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
