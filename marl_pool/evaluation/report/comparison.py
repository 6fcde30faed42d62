"""Methods against each other: ranking, performance profile, improvement, retraining."""

import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from marl_pool.evaluation.comparison import (
    INTERVAL_FROM,
    RANKED_FROM,
    improvement,
    rank,
    retraining_gap,
)
from marl_pool.evaluation.report.components import (
    Block,
    Cell,
    Figure,
    Heading,
    Note,
    Section,
    Table,
    gap,
    listed,
    number,
    span,
)
from marl_pool.evaluation.report.learning_curves import NO_PLOTS
from marl_pool.evaluation.report.plots import (
    Curve,
    Look,
    Panel,
    draw_panels,
    draw_points,
)
from marl_pool.evaluation.report.provenance import origin
from marl_pool.evaluation.report.study import AS_IS, Condition, Measured, Study
from marl_pool.evaluation.statistics import (
    CONFIDENCE,
    Interval,
    interquartile_score,
    optimality_gap,
    performance_profile,
)

THRESHOLDS = 121
FEW = "fewer than two seeds of a method: there is no interval over seeds"
UNDEFINED = (
    "drawn anew, the episodes leave no score: there are too few, or the scripted "
    "policy is hardly better than the random one"
)
Task = tuple[list[Measured], list[Condition]]
"""Methods of one world, and the areas that all of them have."""


def versus(study: Study, looks: Mapping[str, Look], suffix: str) -> list[Section]:
    """Build the sections in which methods of one world stand against each other."""
    tasks = {world: _task(study, world) for world in study.worlds}
    made = [_ranking(study, tasks, looks, suffix)]
    if study.unit == "score" and any(len(own) > 1 for own, _ in tasks.values()):
        made += [
            _profile(study, tasks, looks, suffix),
            _improvement(study, tasks, suffix),
        ]
    if len(study.worlds) > 1:
        made.append(_retraining(study, suffix))
    return made


def _task(study: Study, world: str) -> Task:
    own = study.of_world(world)
    return own, study.common(own, "area") or study.common(own, "clean")


def _titled(study: Study, world: str) -> list[Block]:
    several = len(study.worlds) > 1
    return [Heading(f"Trained and tested in {world}")] if several else []


def _ranking(
    study: Study,
    tasks: Mapping[str, Task],
    looks: Mapping[str, Look],
    suffix: str,
) -> Section:
    section = Section(
        f"ranking{suffix}",
        "Ranking",
        "The interquartile mean, over seeds and perturbations, of the areas above. "
        "Symbols are single seeds, the upright bar is the method; the shade is its "
        "95 % bootstrap interval: seeds resampled first, episodes second. The "
        "optimality gap is by how much areas fall short of 1 on average, lower is "
        "better.",
    )
    if study.unit != "score":
        section.blocks.append(
            Note("Not ranked: no score is defined here, only returns.", gap=True)
        )
        return section
    for world, (own, conditions) in tasks.items():
        section.blocks += _titled(study, world)
        section.blocks += _ranked(study, own, conditions, looks)
    return section


def _ranked(
    study: Study,
    own: Sequence[Measured],
    conditions: Sequence[Condition],
    looks: Mapping[str, Look],
) -> list[Block]:
    if not conditions:
        return [Note("The methods have no condition in common.", gap=True)]
    scores = {one.method.kind: one.under(conditions) for one in own}
    result = rank(scores)
    rows = []
    for name, value in result.places:
        points = [float(interquartile_score(run[None])) for run in scores[name].points]
        rows.append((name, points, *value))
    blocks: list[Block] = []
    if result.refusal:
        blocks.append(Note(result.refusal[0].upper() + result.refusal[1:] + ".", True))
    if importlib.util.find_spec("matplotlib") is None:
        blocks.append(Note(NO_PLOTS, gap=True))
    else:
        svg = draw_points(rows, looks, "interquartile mean of areas")
        blocks.append(Figure(svg, f"Over {_named(study, conditions)}.", origin(own)))
    gaps = {name: float(optimality_gap(one.points)) for name, one in scores.items()}
    blocks.append(_places(result.places, own, gaps, refused=bool(result.refusal)))
    return blocks


def _places(
    places: Sequence[tuple[str, Interval]],
    own: Sequence[Measured],
    gaps: Mapping[str, float],
    *,
    refused: bool,
) -> Table:
    lines = []
    for place, (name, value) in enumerate(places, start=1):
        (one,) = (one for one in own if one.method.kind == name)
        first, title = "" if refused else f"{place}. ", origin([one])
        lines.append(
            [
                Cell(f"{first}{name}"),
                Cell(number(value.value), title),
                _bounds(value, [one], title),
                Cell(number(gaps[name]), title),
                Cell(str(one.scores.seeds), title),
            ]
        )
    head = ["method", "IQM", "95 % over seeds", "optimality gap", "seeds"]
    return Table(head, lines)


def _bounds(value: Interval, own: Sequence[Measured], title: str) -> Cell:
    """The cell of an interval over seeds."""
    return Cell(span(value), title) if span(value) else gap(_unknown(own))


def _unknown(own: Sequence[Measured]) -> str:
    """Why there is no interval."""
    few = min(one.scores.seeds for one in own) < INTERVAL_FROM
    return FEW if few else UNDEFINED


def _named(study: Study, conditions: Sequence[Condition]) -> str:
    if conditions == [AS_IS]:
        return "unperturbed episodes alone"
    return listed([study.named(one) for one in conditions])


def _profile(
    study: Study,
    tasks: Mapping[str, Task],
    looks: Mapping[str, Look],
    suffix: str,
) -> Section:
    section = Section(
        f"performance{suffix}",
        "Performance profile",
        "The share of (seed, perturbation) pairs whose area exceeds a score: a curve "
        "that lies above another everywhere is better everywhere. Bands are 95 %, over "
        "seeds, then episodes.",
    )
    if importlib.util.find_spec("matplotlib") is None:
        section.blocks.append(Note(NO_PLOTS, gap=True))
        return section
    panels = [
        Panel(world, _shares(own, conditions))
        for world, (own, conditions) in tasks.items()
        if conditions
    ]
    if not panels:
        section.blocks.append(Note("No condition in common.", gap=True))
        return section
    svg = draw_panels(
        panels,
        looks,
        xlabel="score",
        ylabel="share of runs above",
        columns=2,
        height=3.0,
        dots=False,
        steps=True,
    )
    caption = "Run-score distributions, averaged over perturbations."
    section.blocks.append(Figure(svg, caption, origin(study.measured)))
    return section


def _shares(own: Sequence[Measured], conditions: Sequence[Condition]) -> list[Curve]:
    scores = [one.under(conditions) for one in own]
    every = np.concatenate([one.points.ravel() for one in scores])
    margin = 0.05 * float(np.ptp(every)) or 0.1
    grid = np.linspace(every.min() - margin, every.max() + margin, THRESHOLDS)
    tail = 50 * (1 - CONFIDENCE)
    curves = []
    for one, own_scores in zip(own, scores, strict=True):
        value = performance_profile(own_scores.points, grid)
        low = high = np.full(len(grid), np.nan)
        drawn = own_scores.resampled()
        if own_scores.seeds >= INTERVAL_FROM and np.isfinite(drawn).all():
            shares = performance_profile(drawn, grid)
            low, high = np.percentile(shares, (tail, 100 - tail), axis=0)
        nobody = np.empty((0, len(grid)))
        curves.append(Curve(one.method.kind, grid, value, low, high, nobody))
    return curves


def _improvement(study: Study, tasks: Mapping[str, Task], suffix: str) -> Section:
    section = Section(
        f"improvement{suffix}",
        "Probability of improvement",
        "How probable it is that a run of the row's method scores more than one of the "
        "column's, averaged over perturbations; a tie is half a win. An interval that "
        f"holds 0.5 says that neither is better. Below {RANKED_FROM} seeds the "
        "intervals are too narrow: read them as a description of these runs.",
    )
    for world, (own, conditions) in tasks.items():
        section.blocks += _titled(study, world)
        if conditions:
            section.blocks.append(_matrix(own, conditions))
    return section


def _matrix(own: Sequence[Measured], conditions: Sequence[Condition]) -> Table:
    scores = [one.under(conditions) for one in own]
    ranked = min(one.seeds for one in scores) >= RANKED_FROM
    lines = []
    for row, one in enumerate(own):
        line = [Cell(one.method.kind)]
        for column, other in enumerate(own):
            if row == column:
                line.append(Cell(""))
                continue
            value = improvement(scores[row], scores[column])
            small = span(value) or "no interval"
            title = "" if span(value) else f"{_unknown([one, other])}; "
            title += origin([one, other])
            # A shade would say which is better, as a ranking does. White is 0.5.
            tone = 2 * value.value - 1 if ranked else None
            line.append(Cell(number(value.value), title, tone, small=small))
        lines.append(line)
    return Table(["P(row > column)", *(one.method.kind for one in own)], lines)


def _retraining(study: Study, suffix: str) -> Section:
    section = Section(
        f"retraining{suffix}",
        "Retraining gap",
        "What training and testing in another world costs: the unperturbed "
        f"{study.unit} of policies trained and tested in the first world, minus that "
        "of other policies trained and tested in the second. No policy is perturbed "
        "here, so this is no loss under perturbation; the AdaPool paper's Figure 7 "
        "reports such a gap.",
    )
    first, *rest = study.worlds
    lines = []
    for one in study.of_world(first):
        for world in rest:
            same = [
                m for m in study.of_world(world) if m.method.kind == one.method.kind
            ]
            lines += [_gap_line(one, other) for other in same]
    if not lines:
        section.blocks.append(Note("No method was trained in two worlds.", gap=True))
        return section
    head = ["method", f"in {first}", "in the other world", "gap", "95 % over seeds"]
    section.blocks.append(Table(head, lines))
    return section


def _gap_line(one: Measured, other: Measured) -> list[Cell]:
    value = retraining_gap(one.under([AS_IS]), other.under([AS_IS]))
    both = origin([one, other])
    return [
        Cell(one.method.kind, small=other.method.world),
        Cell(number(one.mean(AS_IS).value), origin([one])),
        Cell(number(other.mean(AS_IS).value), origin([other])),
        Cell(number(value.value), both),
        _bounds(value, [one, other], both),
    ]
