"""The policies at work: what they attend to, and how they look."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_pool.errors import InputError
from marl_pool.evaluation.report.attention import (
    STEPS,
    WORLDS,
    Looked,
    look,
    mean_of,
)
from marl_pool.evaluation.report.components import (
    Cell,
    Film,
    Note,
    Section,
    Table,
    gap,
    number,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.sources import Source
from marl_pool.evaluation.report.study import AS_IS, Condition, Study
from marl_pool.evaluation.report.videos import side_by_side
from marl_pool.evaluation.subject import Subject

OPEN = {"checkpoint": "best", "seed": 0, "device": "cpu", "env": None}
ALIKE = ("checkpoint", "seed", "rescale_codes")
"""What is as in the evaluation, beside the world."""
NO_WEIGHTS = "its pooling head has no attention weights"
Opened = Subject | str
"""A run's policies, or why they cannot be read."""


def opened(source: Source, plugins: Collection[str]) -> Opened:
    """Read a run's policies as its evaluation did; without one, the best."""
    settings: dict[str, Any] = dict(OPEN)
    if source.evaluation is not None:
        about = source.evaluation.about
        settings |= {key: about[key] for key in ALIKE}
        settings["env"] = about["env"] if about["changed"] else None
    try:
        return Subject.load(source.run, settings, plugins)
    except InputError as error:
        return source.told(error)


def learned(subject: Subject) -> list[str]:
    """The groups of agents whose policies were trained."""
    return [name for name in subject.policies if name not in subject.fixed]


def attention(
    methods: Sequence[Method], subjects: Mapping[Path, Opened], group: str, suffix: str
) -> Section:
    """Build the table of entropies and shares."""
    section = Section(
        f"attention{suffix}",
        "Attention",
        f"Unperturbed, over {WORLDS} worlds and {STEPS} steps, of agents that lived. "
        "Entropy is that of the pooling head's weights over that of equal ones: 1 is "
        "even, 0 is one token. Shares are of the weight; small, what equal weights "
        "would give.",
    )
    found = {method.name: _looks(method, subjects, group) for method in methods}
    looked = [one for looks, _ in found.values() for one in looks.values()]
    kinds = list(
        dict.fromkeys(
            kind for one in looked for kind, there in one.present.items() if there
        )
    )
    if not looked:
        reasons = dict.fromkeys(f"{name}: {why}" for name, (_, why) in found.items())
        section.blocks.append(Note("; ".join(reasons) + ".", gap=True))
        return section
    lines = [
        _attention_line(method, *found[method.name], kinds=kinds) for method in methods
    ]
    section.blocks.append(Table(["method", "entropy", *kinds], lines))
    return section


def _looks(
    method: Method, subjects: Mapping[Path, Opened], group: str
) -> tuple[dict[str, Looked], str]:
    """What each run attends to, by its origin; why one is missing, if one is."""
    looks, why = {}, ""
    for source in method.sources:
        subject = subjects[source.run.path]
        reason = _cannot(subject, group)
        if reason or isinstance(subject, str):
            why = reason
            continue
        one = look(subject, group)
        if one is None:
            why = NO_WEIGHTS
        else:
            looks[_origin(source, subject)] = one
    return looks, why


def _cannot(subject: Opened, group: str) -> str:
    """Why a policy cannot be looked at; empty if it can."""
    if isinstance(subject, str):
        return subject
    if group not in learned(subject):
        return f"the group {group!r} did not learn in this run"
    return ""


def _origin(source: Source, subject: Subject) -> str:
    return (
        f"{source.name}, checkpoint {subject.name}, {WORLDS} worlds of seed "
        f"{subject.seed}, {STEPS} steps"
    )


def _attention_line(
    method: Method, looks: Mapping[str, Looked], why: str, *, kinds: Sequence[str]
) -> list[Cell]:
    if why or not looks:
        return [Cell(method.name), *(gap(why) for _ in range(len(kinds) + 1))]
    entropies = {name: one.entropy for name, one in looks.items()}
    seeds = [f"{name}: {number(entropy)}" for name, entropy in entropies.items()]
    mean = float(np.mean(list(entropies.values())))
    line = [Cell(method.name), Cell(number(mean), "; ".join(seeds))]
    for kind in kinds:
        share, present = mean_of(list(looks.values()), kind)
        seeds = [f"{name}: {o.shares.get(kind, 0.0):.0%}" for name, o in looks.items()]
        title = f"{'; '.join(seeds)}; equal weights: {present:.0%}"
        line.append(Cell(f"{share:.0%}", title, small=f"{present:.0%}"))
    return line


def videos(
    methods: Sequence[Method],
    subjects: Mapping[Path, Opened],
    study: Study | None,
    group: str,
    suffix: str,
) -> Section:
    """Build the section of videos, one for each method."""
    condition = _telling(study)
    options = None if study is None or condition is None else _options(study, condition)
    about = "" if condition is None else f"{condition.label} {condition.severity:g}"
    beside = f", and on the right the same world under {about}" if about else ""
    section = Section(
        f"videos{suffix}",
        "At work",
        "The first evaluation world, unperturbed"
        f"{beside}. Lines, where there are any, are the pooling head's attention.",
    )
    for method in methods:
        source = method.sources[0]
        subject = subjects[source.run.path]
        caption = f"{method.name}, training seed {source.seed}"
        reason = _cannot(subject, group)
        if reason or isinstance(subject, str):
            section.blocks.append(Note(f"{caption}: {reason}", gap=True))
            continue
        try:
            data = side_by_side(subject, options, about, group)
        except (InputError, ModuleNotFoundError) as error:
            why = f"{caption}: no video: {source.told(error)}"
            section.blocks.append(Note(why, gap=True))
            continue
        columns = ["unperturbed", about] if about else ["unperturbed"]
        title = f"{source.name}, checkpoint {subject.name}"
        section.blocks.append(Film(data, columns, caption, title))
    return section


def _telling(study: Study | None) -> Condition | None:
    """The perturbation and severity that costs most, of those that all met."""
    if study is None or not study.measured:
        return None
    rungs = [one for one in study.common(study.measured, "rung") if one.severity]
    if not rungs:
        return None
    worst = min(rungs, key=lambda one: _score(study, one))
    return worst if _score(study, worst) < _score(study, AS_IS) else rungs[0]


def _score(study: Study, one: Condition) -> float:
    return float(np.mean([own.mean(one).value for own in study.measured]))


def _options(study: Study, condition: Condition) -> dict[str, Any]:
    row = study.row(condition)
    own = {"name": row["perturbation"], "severity": row["severity"]}
    return {**row["options"], **own}
