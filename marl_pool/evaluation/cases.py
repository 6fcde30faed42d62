"""The cases of an evaluation: who plays, and what is done to what they see."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl_pool.envs.base import World
from marl_pool.errors import InputError, UnfitTokensError
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
        perturbation: None for clean, and for a gap.
        name: of the perturbation, or "clean".
        options: of it, without severity.
        severity: of it, in [0, 1].
        gap: why it cannot be played; empty where it can.
    """

    policy: str
    policies: Mapping[str, Policy]
    explore: bool = False
    perturbation: Perturbation | None = None
    name: str = CLEAN
    options: Mapping[str, Any] = field(default_factory=dict)
    severity: float = 0.0
    gap: str = ""

    def result(self, group: str, **numbers: Any) -> Result:
        """A record for one of the groups."""
        return Result(
            group=group,
            policy=self.policy,
            stochastic=self.explore,
            perturbation=self.name,
            label=label(self.name, self.options),
            severity=self.severity,
            options=dict(self.options),
            **numbers,
        )


def conditions(
    perturbations: Sequence[Mapping[str, Any]], world: World
) -> list[dict[str, Any]]:
    """Build each perturbation at each of its severities.

    One for a type of token that the world lacks is a gap.

    Raises:
        InputError: an unknown name, a wrong option, no severities.
    """
    built = []
    for entry in perturbations:
        name, severities = entry.get("name"), entry.get("severities")
        if not isinstance(name, str):
            raise InputError(f"perturbation: expected a name, got {dict(entry)}")
        if not isinstance(severities, Sequence) or not severities:
            raise InputError(
                f"perturbation {name!r}: expected severities, a list of numbers in "
                f"[0, 1], got {severities!r}"
            )
        options = {k: v for k, v in entry.items() if k not in ("name", "severities")}
        for severity in severities:
            case = {"name": name, "options": options, "severity": severity}
            try:
                made = perturb({"name": name, **options, "severity": severity}, world)
                built.append({**case, "perturbation": made})
            except UnfitTokensError as error:
                built.append({**case, "gap": str(error)})
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
