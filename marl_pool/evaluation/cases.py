"""The cases of an evaluation: who plays, and what is done to what they see."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl_pool.envs.base import World
from marl_pool.evaluation.results import CLEAN, Result
from marl_pool.evaluation.subject import perturb
from marl_pool.names import resolve
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy


@dataclass(frozen=True)
class Case:
    """Who plays, and what is done to what they see.

    Attributes:
        policy: the name of who plays.
        policies: by group.
        explore: sample actions.
        perturbation: None for clean.
        name: of the perturbation, or "clean".
        options: of it, without severity.
    """

    policy: str
    policies: Mapping[str, Policy]
    explore: bool = False
    perturbation: Perturbation | None = None
    name: str = CLEAN
    options: Mapping[str, Any] = field(default_factory=dict)

    def result(self, group: str, **numbers: Any) -> Result:
        """A record for one of the groups."""
        severity = self.perturbation.severity if self.perturbation else 0.0
        return Result(
            group=group,
            policy=self.policy,
            stochastic=self.explore,
            perturbation=self.name,
            label=label(self.name, self.options),
            severity=severity,
            options=dict(self.options),
            **numbers,
        )


def conditions(
    perturbations: Sequence[Mapping[str, Any]], world: World
) -> list[dict[str, Any]]:
    """Build each perturbation at each of its severities.

    Raises:
        InputError: an unknown name, a wrong option, no severities.
    """
    built = []
    for entry in perturbations:
        options = {k: v for k, v in entry.items() if k not in ("name", "severities")}
        for severity in entry["severities"]:
            perturbation = perturb(
                {"name": entry["name"], **options, "severity": severity}, world
            )
            built.append(
                {
                    "name": entry["name"],
                    "options": options,
                    "perturbation": perturbation,
                }
            )
    return built


def label(name: str, options: Mapping[str, Any]) -> str:
    """A perturbation's name and those of its options that are not the default."""
    if name == CLEAN:
        return name
    known = inspect.signature(
        resolve(name, PERTURBATIONS, "perturbation", Perturbation)
    ).parameters
    telling = [
        f"{key}={value}"
        for key, value in options.items()
        if key not in known or known[key].default != value
    ]
    return " ".join([name, *telling])
