"""Cards of the policies that ship with the package, `marl_pool.pretrained`.

A card, ``card.json`` beside the policy, records its training and its evaluation.
``scripts/pretrained.py`` writes it.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from marl_pool.evaluation.results import (
    CLEAN,
    NAN,
    TRAINED,
    Result,
    SeverityAUC,
    interval_of,
)
from marl_pool.evaluation.statistics.intervals import Interval
from marl_pool.evaluation.statistics.scores import HEURISTIC, RANDOM, mean_over
from marl_pool.files.atomic import write_json
from marl_pool.files.manifest import sealed_json
from marl_pool.files.reading import read_json
from marl_pool.pretrained import CARD, pretrained_path, pretrained_summary
from marl_pool.utils.progress import duration

if TYPE_CHECKING:
    from marl_pool.evaluation.measure import EvaluationResults

DIGITS = 4
"""Decimals in a card."""
SUITE = "standard"
"""Suite of the evaluation in a card."""


@dataclass(frozen=True)
class GroupCard:
    """Results of a group of agents that takes its most likely actions.

    Numbers are NaN where they could not be measured.

    Attributes:
        returns: unperturbed return, with a 95 % bootstrap interval over episodes.
        random: return if all trained groups take random actions.
        scripted: return if all trained groups follow the scripted policy.
        score: return on a scale from 0, random actions, to 1, the scripted policy; NaN
            if several groups learn or there is no scripted policy.
        areas: mean score over severity by perturbation, or mean return if there is no
            score.
    """

    returns: Interval
    random: float
    scripted: float
    score: Interval
    areas: dict[str, float]

    @classmethod
    def from_results(cls, results: "EvaluationResults", group: str) -> Self:
        """Summarize the rows of a group in which no actions were sampled."""
        rows = [
            row for row in results.results if row.group == group and not row.stochastic
        ]
        clean = {row.policy: row for row in rows if row.perturbation == CLEAN}
        trained = clean[TRAINED]
        score = interval_of(trained, "score")
        return cls(
            returns=interval_of(trained, "mean"),
            random=clean[RANDOM].mean,
            scripted=clean[HEURISTIC].mean if HEURISTIC in clean else NAN,
            score=score,
            areas={
                auc.label: _mean_return(auc, rows, trained)
                if math.isnan(score.value)
                else auc.auc
                for auc in results.aucs
                if auc.group == group and not auc.stochastic
            },
        )

    @property
    def area_name(self) -> str:
        """Meaning of the numbers in ``areas``."""
        number = "return" if math.isnan(self.score.value) else "score"
        return f"mean {number} over severity"

    @property
    def baselines(self) -> str:
        """The returns of random actions and of the scripted policy."""
        scripted = (
            "" if math.isnan(self.scripted) else f", scripted {self.scripted:.3f}"
        )
        return f"random {self.random:.3f}{scripted}"


def _mean_return(auc: SeverityAUC, rows: list[Result], clean: Result) -> float:
    means = {row.severity: row.mean for row in rows if row.label == auc.label}
    means = {0.0: clean.mean, **means}
    severities = sorted(means)
    return float(mean_over([np.array(means[s]) for s in severities], severities))


@dataclass(frozen=True)
class PretrainedCard:
    """Record of a policy's training and evaluation.

    Attributes:
        commands: shell commands that trained it, in order.
        commit: commit of the checkout that trained it or added it to the package.
        env_steps: environment steps of the last run, or None if they were not counted.
        seconds: training time on one core of a busy machine, or None.
        parameters: number of parameters of all modules.
        weights: SHA-256 of the weights file.
        episodes: episodes of each row of the evaluation.
        measured: commit of the evaluation.
        groups: results of each group of agents.
    """

    commands: tuple[str, ...]
    commit: str
    env_steps: int | None
    seconds: float | None
    parameters: int
    weights: str
    episodes: int
    measured: str
    groups: dict[str, GroupCard]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the card of a policy's folder."""
        content = read_json(folder / CARD)
        del content["sha256"]
        groups = {
            name: GroupCard(
                returns=Interval(*map(_number, group["returns"])),
                random=_number(group["random"]),
                scripted=_number(group["scripted"]),
                score=Interval(*map(_number, group["score"])),
                areas={label: _number(area) for label, area in group["areas"].items()},
            )
            for name, group in content.pop("groups").items()
        }
        return cls(commands=tuple(content.pop("commands")), groups=groups, **content)

    def write(self, folder: Path) -> None:
        """Write the card into a policy's folder."""
        content = sealed_json(_plain(asdict(self)))
        write_json(folder / CARD, content, indent=1, allow_nan=False)

    @property
    def training(self) -> str:
        """Steps, time and commit of the training."""
        steps = [f"{self.env_steps:,} env steps"] if self.env_steps else []
        times = [f"{duration(self.seconds)} on one core"] if self.seconds else []
        return ", ".join([*steps, *times, f"commit {self.commit}"])

    @property
    def evaluation(self) -> str:
        """Suite, episodes and commit of the evaluation."""
        return (
            f"suite={SUITE}, {self.episodes} episodes a row, most likely actions, "
            f"commit {self.measured}"
        )


def _number(value: float | None) -> float:
    return NAN if value is None else value


def _plain(value: Any) -> Any:
    """Return plain data with rounded numbers, and None for NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, DIGITS)
    return value


def card_text(name: str) -> str:
    """Return the card of a pretrained policy as text.

    Raises:
        InputError: an unknown name.
    """
    card = PretrainedCard.read(pretrained_path(name))
    return "\n".join(_lines(name, card)) + "\n"


def _lines(name: str, card: PretrainedCard) -> Iterator[str]:
    yield f"{name}: {pretrained_summary(name)}"
    yield f"{card.parameters:,} parameters"
    yield "\ntraining:"
    yield from (f"  {command}" for command in card.commands)
    yield f"  {card.training}"
    yield f"\nevaluation: {card.evaluation}"
    for group, numbers in card.groups.items():
        yield f"  {group}:"
        yield f"    return {numbers.returns.text()}; {numbers.baselines}"
        if score := numbers.score.text():
            yield f"    score  {score}; 0 is random, 1 scripted"
        yield f"    {numbers.area_name}:"
        width = max(map(len, numbers.areas))
        for label, area in numbers.areas.items():
            yield f"      {label:<{width}} {area_text(area)}"


def area_text(area: float) -> str:
    """Format one of `GroupCard.areas`."""
    return "not measured" if math.isnan(area) else f"{area:.3f}"
