"""The cases of an evaluation: who plays, and what is done to what they see."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.results import CLEAN, TRAINED, WORLD, Result
from marl_pool.perturbations import PERTURBATIONS, make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.severity import refuse_ramp
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import resolve
from marl_pool.utils.signatures import options_of


@dataclass(frozen=True)
class TransferEnv:
    """A world other than the one that all else is measured in.

    Attributes:
        label: of its row.
        env: options of the env that differ.
        make: makes the worlds, of the same numbers as the others.
        policies: by group, made ready for it.
        baselines: other policies by name, which play there too.
        gap: why it cannot be played; empty where it can.
    """

    label: str
    env: Mapping[str, Any]
    make: Callable[[], BatchedEnv]
    policies: Mapping[str, Policy]
    baselines: Mapping[str, Mapping[str, Policy]] = field(default_factory=dict)
    gap: str = ""


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
        other: the world, where it is another one.
        gap: why it cannot be played; empty where it can.
        exact: the policies are as they were given, and not in float32.
        hidden: played for others to be compared with; it is no row.
    """

    policy: str
    policies: Mapping[str, Policy]
    explore: bool = False
    perturbation: Perturbation | None = None
    name: str = CLEAN
    options: Mapping[str, Any] = field(default_factory=dict)
    severity: float = 0.0
    other: TransferEnv | None = None
    gap: str = ""
    exact: bool = True
    hidden: bool = False

    def result(self, group: str, **numbers: Any) -> Result:
        """A record for one of the groups."""
        return Result(
            group=group,
            policy=self.policy,
            stochastic=self.explore,
            perturbation=self.name,
            label=self.other.label if self.other else label(self.name, self.options),
            severity=self.severity,
            options=dict(self.options),
            world=dict(self.other.env) if self.other else {},
            **numbers,
        )


def cases_of(
    policies: Mapping[str, Policy],
    perturbations: Sequence[Mapping[str, Any]],
    others: Sequence[TransferEnv],
    world: BatchedEnv,
) -> list[Case]:
    """The clean case, each perturbation at each severity, and each other world.

    Raises:
        InputError: a wrong perturbation, or the same row twice.
    """
    perturbed = conditions(perturbations, world)
    _refuse_twice([(label(c["name"], c["options"]), c["severity"]) for c in perturbed])
    _refuse_twice([(other.label, None) for other in others])
    return [
        Case(TRAINED, policies),
        *(Case(TRAINED, policies, **condition) for condition in perturbed),
        *(
            Case(TRAINED, other.policies, name=WORLD, other=other, gap=other.gap)
            for other in others
        ),
    ]


def _refuse_twice(labels: Sequence[tuple[str, float | None]]) -> None:
    """Refuse rows that nothing would tell apart."""
    for name, severity in {key for key in labels if labels.count(key) > 1}:
        at = "" if severity is None else f" at severity {severity:g}"
        raise InputError(f"{name!r}{at}: expected each row once, got it twice")


def perturb(options: Mapping[str, Any], world: BatchedEnv) -> Perturbation:
    """Build the perturbation ``{"name": …, **options}`` for the groups of a world.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    refuse_ramp(options, "each world plays one episode")
    severity = options.get("severity")
    if isinstance(severity, Sequence):
        raise InputError(
            "perturbation.severity: expected a number outside training, got "
            f"{severity!r}"
        )
    specs = [group.tokens for group in world.groups.values()]
    return make_perturbation(specs=specs, **options)


def conditions(
    perturbations: Sequence[Mapping[str, Any]], world: BatchedEnv
) -> list[dict[str, Any]]:
    """Build each perturbation at each of its severities.

    One that does not fit the tokens of the world is a gap, with its reason.

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
            if isinstance(severity, bool) or not isinstance(severity, int | float):
                raise InputError(
                    f"perturbation {name!r}: expected severities to be numbers in "
                    f"[0, 1], got {severity!r}"
                )
            case = {"name": name, "options": options, "severity": severity}
            try:
                made = perturb({"name": name, **options, "severity": severity}, world)
                built.append({**case, "perturbation": made, "gap": ""})
            except UnfitTokensError as error:
                built.append({**case, "gap": str(error)})
    return built


def label(name: str, options: Mapping[str, Any]) -> str:
    """A perturbation's name and those of its options that are not the default."""
    if name == CLEAN:
        return name
    known = options_of(resolve(name, PERTURBATIONS, "perturbation", Perturbation))
    telling = [
        f"{key}={value}"
        for key, value in options.items()
        if key not in known or known[key].default != value
    ]
    return " ".join([name, *telling])
