"""What the page says first: three sentences and a table, from the numbers."""

import math
from collections.abc import Sequence

import numpy as np

from marl_pool.evaluation.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    mean_score,
    over_seeds,
    rank,
)
from marl_pool.evaluation.report.blocks import (
    Cell,
    Section,
    Table,
    counted,
    gap,
    listed,
    number,
    span,
)
from marl_pool.evaluation.report.learning import RETURN
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.robustness import origin
from marl_pool.evaluation.report.study import AS_IS, Condition, Measured, Study

LAST = 0.1
"""Share of the training whose episodes count as its end."""


def summary(methods: Sequence[Method], study: Study | None) -> str:
    """Three sentences: what was done, what hurts, and what may be concluded."""
    runs = sum(len(method.sources) for method in methods)
    env = methods[0].sources[0].run.config["env"]["name"].rpartition(":")[2]
    kinds = list(dict.fromkeys(method.kind for method in methods))
    worlds = len({method.world for method in methods})
    where = f", in {worlds} worlds" if worlds > 1 else ""
    first = (
        f"{counted(runs, 'run')} of {counted(len(methods), 'method')} "
        f"({listed(kinds)}{where}) learned {env}"
    )
    if study is None or not study.measured:
        return (
            f"{first}. None of them has an evaluation that counts, so nothing is known "
            "of how they behave under perturbation. The learning curves below are of "
            "training episodes."
        )
    return f"{first}, {_tested(study)}. {_hurts(study)} {_concluded(study)}"


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
    apart = "apart" if value.low > its.high else "within each other's intervals"
    return (
        f"{where} keeps most, {number(value.value)} ({span(value)}), before {second} "
        f"with {number(its.value)} ({span(its)}): {apart}."
    )


def overview(methods: Sequence[Method], study: Study | None) -> Section:
    """Build the table with a row for each method."""
    section = Section(
        "overview",
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
        line = [Cell(method.name), _seeds(method), _training(method), _return(method)]
        if scored:
            line += [_clean(own, method), _mean_area(own, areas)]
        lines.append(line)
    section.blocks.append(Table(head, lines))
    return section


def _seeds(method: Method) -> Cell:
    names = ", ".join(str(source.seed) for source in method.sources)
    return Cell(str(len(method.sources)), f"training seeds {names}")


def _training(method: Method) -> Cell:
    ends = []
    for source in method.sources:
        rows = [row.get(RETURN, math.nan) for row in source.metrics]
        last = [r for r in rows[-max(1, round(LAST * len(rows))) :] if r == r]
        if last:
            ends.append(float(np.mean(last)))
    if not ends:
        return gap(f"no {RETURN} in metrics.csv")
    each = ", ".join(map(number, ends))
    small = each if 1 < len(ends) < RANKED_FROM else ""
    return Cell(number(float(np.mean(ends))), f"metrics.csv; {each}", small=small)


def _return(method: Method) -> Cell:
    means = []
    for source in method.evaluated:
        assert source.evaluation is not None
        rows = zip(source.evaluation.rows, source.evaluation.returns, strict=True)
        means.append(next(float(own.mean()) for row, own in rows if _plain(row)))
    if not means:
        return gap(method.sources[0].gap)
    each = ", ".join(map(number, means))
    small = each if 1 < len(means) < RANKED_FROM else ""
    return Cell(number(float(np.mean(means))), f"results.json; {each}", small=small)


def _plain(row: dict[str, object]) -> bool:
    trained = row["policy"] == "trained" and row["perturbation"] == "clean"
    return trained and not row["stochastic"] and not row["fixed"]


def _clean(own: Measured | None, method: Method) -> Cell:
    if own is None:
        return gap(method.sources[0].gap)
    return Cell(
        number(own.mean(AS_IS).value), origin([own]), small=_small(own, [AS_IS])
    )


def _mean_area(own: Measured | None, areas: Sequence[Condition]) -> Cell:
    if own is None or not areas:
        return gap("no perturbation that all methods were measured under")
    title = f"mean of {listed([one.label for one in areas])}; {origin([own])}"
    mean = float(own.under(areas).points.mean())
    return Cell(number(mean), title, small=_small(own, areas))


def _small(own: Measured, conditions: Sequence[Condition]) -> str:
    scores = own.under(conditions)
    each = [number(float(run.mean())) for run in scores.points]
    if len(each) < RANKED_FROM:
        return ", ".join(each) if len(each) >= INTERVAL_FROM else "one seed"
    return span(over_seeds(scores, mean_score))
