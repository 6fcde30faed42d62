"""What the page says first: three sentences and a table, from the numbers."""

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
    Cell,
    Section,
    Table,
    counted,
    gap,
    listed,
    number,
    span,
)
from marl_pool.evaluation.report.learning_curves import RETURN
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.provenance import origin, recorded
from marl_pool.evaluation.report.study import AS_IS, Condition, Measured, Study
from marl_pool.evaluation.results import CLEAN, TRAINED
from marl_pool.evaluation.statistics import Interval

LAST = 0.1
"""Share of the training whose episodes count as its end."""


def summary(methods: Sequence[Method], studies: Mapping[str, Study]) -> str:
    """What was done, what hurts, and what may be concluded: three sentences.

    Of several groups of agents the last two stand for each.

    Args:
        methods: all of them.
        studies: by group.
    """
    runs = sum(len(method.sources) for method in methods)
    env = methods[0].sources[0].run.config["env"]["name"].rpartition(":")[2]
    kinds = list(dict.fromkeys(method.kind for method in methods))
    worlds = len({method.world for method in methods})
    where = f", in {worlds} worlds" if worlds > 1 else ""
    first = (
        f"{counted(runs, 'run')} of {counted(len(methods), 'method')} "
        f"({listed(kinds)}{where}) learned {env}"
    )
    if not studies:
        return (
            f"{first}. None of them has an evaluation that counts, so nothing is known "
            "of how they behave under perturbation. The learning curves below are of "
            "training episodes."
        )
    found = [
        (f"As for {group}: " if len(studies) > 1 else "")
        + f"{_hurts(study)} {_concluded(study)}"
        for group, study in studies.items()
    ]
    tested = _tested(next(iter(studies.values())))
    return " ".join([f"{first}, {tested}.", *found])


def _tested(study: Study) -> str:
    evaluation = study.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    seeds = sorted({own.scores.seeds for own in study.measured})
    span_ = counted(seeds[0], "seed")
    if len(seeds) > 1:
        span_ = f"{seeds[0]} to {seeds[-1]} seeds"
    ladders = len(study.labels("area"))
    worlds = len(study.labels("world"))
    beside = f" and {counted(worlds, 'other world')}" if worlds else ""
    return (
        f"{span_} each, and were tested in {evaluation.about['episodes']} episodes a "
        f"condition, under {counted(ladders, 'perturbation')}{beside}"
    )


def _hurts(study: Study) -> str:
    """Which perturbation costs most and which least, over all methods."""
    areas = study.common(study.measured, "area")
    clean = np.mean([own.mean(AS_IS).value for own in study.measured])
    if not areas:
        return f"Unperturbed, their mean {study.unit} is {number(float(clean))}."
    means = {
        one.label: float(np.mean([own.mean(one).value for own in study.measured]))
        for one in areas
    }
    worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    text = (
        f"Unperturbed they score {number(float(clean))} on average (0 is random, 1 the "
        f"scripted policy), and {worst} costs most: {number(means[worst])} is left, "
        "averaged over its severities"
    )
    return (
        f"{text}." if worst == best else f"{text}; {best} leaves {number(means[best])}."
    )


def _concluded(study: Study) -> str:
    """The order of methods where it is given, else why there is none."""
    if study.unit != "score":
        return "No score is defined in this world, so methods are not compared."
    if len(study.measured) < 2:
        return "There is one method, so there is nothing to rank."
    fewest = min(own.scores.seeds for own in study.measured)
    if fewest < RANKED_FROM:
        return (
            f"With {counted(fewest, 'seed')} of a method no order of the methods is "
            f"claimed ({RANKED_FROM} are needed): the page shows each seed instead."
        )
    return " ".join(filter(None, (_leader(study, world) for world in study.worlds)))


def _leader(study: Study, world: str) -> str:
    own = study.of_world(world)
    conditions = study.common(own, "area")
    if len(own) < 2 or not conditions:
        return ""
    places = rank({one.method.kind: one.under(conditions) for one in own}).places
    (name, value), (second, its) = places[:2]
    where = f"In {world}, {name}" if world else name[0].upper() + name[1:]
    return (
        f"{where} keeps most, {_ranged(value)}, before {second} with {_ranged(its)}: "
        f"{_apart(value, its)}."
    )


def _ranged(value: Interval) -> str:
    return f"{number(value.value)} ({span(value) or 'no interval'})"


def _apart(first: Interval, second: Interval) -> str:
    if math.isnan(first.low) or math.isnan(second.low):
        return "without intervals nobody knows whether they are apart"
    apart = first.low > second.high
    return "apart" if apart else "within each other's intervals"


def overview(methods: Sequence[Method], study: Study | None, suffix: str) -> Section:
    """Build the table with a row for each method."""
    section = Section(
        f"overview{suffix}",
        "At a glance",
        "Training return is the mean of the last tenth of training, with sampled "
        "actions; the other numbers are of the deterministic policy in worlds that "
        f"training never meets. Small: each seed below {RANKED_FROM} seeds, else the "
        "95 % interval over seeds.",
    )
    measured = {own.method.name: own for own in study.measured} if study else {}
    areas = study.common(study.measured, "area") if study else []
    scored = study is not None and study.unit == "score"
    head = ["method", "seeds", "training return", "unperturbed return"]
    head += ["unperturbed score", "mean area"] if scored else []
    lines = []
    for method in methods:
        own = measured.get(method.name)
        missing = study.lacking(method) if study else method.sources[0].gap
        line = [Cell(method.name), _seeds(method), _training(method)]
        if study is None or own is None:
            line += [gap(missing) for _ in head[len(line) :]]
        else:
            line.append(_return(own, study.group))
            line += [_clean(own), _mean_area(own, areas)] if scored else []
        lines.append(line)
    section.blocks.append(Table(head, lines))
    return section


def _seeds(method: Method) -> Cell:
    names = [f"{one.seed} of {one.name}/config.yaml" for one in method.sources]
    return Cell(str(len(method.sources)), f"training seeds {', '.join(names)}")


def _training(method: Method) -> Cell:
    ends = {}
    for source in method.sources:
        rows = [row.get(RETURN, math.nan) for row in source.metrics]
        last = [r for r in rows[-max(1, round(LAST * len(rows))) :] if r == r]
        if last:
            place = source.where(source.run.metrics_path)
            ends[f"{place}, mean of its last {len(last)} rows"] = float(np.mean(last))
    if not ends:
        reasons = [source.metrics_gap for source in method.sources]
        return gap(next(filter(None, reasons), f"no {RETURN} in metrics.csv"))
    return _mean(ends)


def _return(own: Measured, group: str) -> Cell:
    means = {}
    for source in own.method.evaluated:
        assert source.evaluation is not None
        evaluation = source.evaluation
        rows = zip(evaluation.rows, evaluation.returns, strict=True)
        episodes = next(own for row, own in rows if _plain(row, group))
        commit = recorded(evaluation.about, "commit")
        name = f"{source.where(evaluation.path)}, commit {commit}, {len(episodes)}"
        means[f"{name} episodes"] = float(episodes.mean())
    return _mean(means)


def _mean(values: Mapping[str, float]) -> Cell:
    """The mean over runs of numbers, each below its origin; few stand there too."""
    each = list(map(number, values.values()))
    title = "; ".join(f"{name}: {one}" for name, one in zip(values, each, strict=True))
    small = ", ".join(each) if 1 < len(each) < RANKED_FROM else ""
    return Cell(number(float(np.mean(list(values.values())))), title, small=small)


def _plain(row: Mapping[str, object], group: str) -> bool:
    trained = row["policy"] == TRAINED and row["perturbation"] == CLEAN
    own = row["group"] == group and not row["fixed"]
    return trained and own and not row["stochastic"]


def _clean(own: Measured) -> Cell:
    return Cell(
        number(own.mean(AS_IS).value), origin([own]), small=_small(own, [AS_IS])
    )


def _mean_area(own: Measured, areas: Sequence[Condition]) -> Cell:
    if not areas:
        return gap("no perturbation that all methods were measured under")
    title = f"mean of {listed([one.label for one in areas])}; {origin([own])}"
    mean = float(own.under(areas).points.mean())
    return Cell(number(mean), title, small=_small(own, areas))


def _small(own: Measured, conditions: Sequence[Condition]) -> str:
    scores = own.under(conditions)
    each = [number(float(run.mean())) for run in scores.points]
    if len(each) < RANKED_FROM:
        return ", ".join(each) if len(each) >= INTERVAL_FROM else "one seed"
    return span(over_seeds(scores, mean_score)) or "no interval"
