"""Cases of an evaluation: policies, with a perturbation or another environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER, Result
from marl_pool.evaluation.settings import PerturbationLevels
from marl_pool.perturbations import PERTURBATIONS, make_perturbation
from marl_pool.perturbations.base import Perturbation, validate_no_ramp
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.names import resolve
from marl_pool.utils.signatures import options_of


@dataclass(frozen=True)
class TransferEnv:
    """An environment that differs from the one of all other cases.

    Attributes:
        label: label of its row.
        env: options of the env that differ.
        make: makes the environments, numbered as those of the other cases.
        policies: policies by group, rescaled if asked for.
        baselines: other policies by name, which play in it too.
        missing: reason why it cannot be played; empty if it can.
    """

    label: str
    env: Mapping[str, Any]
    make: Callable[[], BatchedEnv]
    policies: Mapping[str, Policy]
    baselines: Mapping[str, Mapping[str, Policy]] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True)
class Case:
    """Policies under one condition, each of which plays the same episodes.

    Attributes:
        policy: ``"trained"`` or the name of a baseline.
        policies: policies by group.
        explore: sample actions.
        perturbation: None for clean episodes, and if it does not fit the tokens.
        name: name of the perturbation, ``"clean"`` or ``"transfer"``.
        options: options of the perturbation, without severity.
        severity: severity in [0, 1].
        transfer: the other environment, if it is one.
        missing: reason why it cannot be played; empty if it can.
        exact: the policies have their original precision, not float32.
        hidden: played for comparison only, without a row of its own.
    """

    policy: str
    policies: Mapping[str, Policy]
    explore: bool = False
    perturbation: Perturbation | None = None
    name: str = CLEAN
    options: Mapping[str, Any] = field(default_factory=dict)
    severity: float = 0.0
    transfer: TransferEnv | None = None
    missing: str = ""
    exact: bool = True
    hidden: bool = False

    def result(self, group: str, **numbers: Any) -> Result:
        """Return the row of one group."""
        transfer = self.transfer
        return Result(
            group=group,
            policy=self.policy,
            stochastic=self.explore,
            perturbation=self.name,
            label=transfer.label if transfer else label(self.name, self.options),
            severity=self.severity,
            options=dict(self.options),
            transfer_env=dict(transfer.env) if transfer else {},
            **numbers,
        )


def cases_of(
    policies: Mapping[str, Policy],
    perturbations: Sequence[PerturbationLevels],
    transfers: Sequence[TransferEnv],
    env: BatchedEnv,
) -> list[Case]:
    """Return the clean case, each perturbation at each severity, and each transfer env.

    Raises:
        InputError: a wrong perturbation, or the same row twice.
    """
    perturbed = [
        case for levels in perturbations for case in _levels(policies, levels, env)
    ]
    rows = [(label(case.name, case.options), case.severity) for case in perturbed]
    _validate_unique(rows)
    _validate_unique([(transfer.label, None) for transfer in transfers])
    return [
        Case(TRAINED, policies),
        *perturbed,
        *(
            Case(
                TRAINED,
                transfer.policies,
                name=TRANSFER,
                transfer=transfer,
                missing=transfer.missing,
            )
            for transfer in transfers
        ),
    ]


def _levels(
    policies: Mapping[str, Policy], levels: PerturbationLevels, env: BatchedEnv
) -> list[Case]:
    """Return a case for each severity, with a reason if it does not fit the tokens."""
    cases = []
    for severity in levels.severities:
        perturbation, missing = None, ""
        config = {"name": levels.name, **levels.options, "severity": severity}
        try:
            perturbation = perturb(config, env)
        except UnfitTokensError as error:
            missing = str(error)
        cases.append(
            Case(
                TRAINED,
                policies,
                perturbation=perturbation,
                name=levels.name,
                options=levels.options,
                severity=severity,
                missing=missing,
            )
        )
    return cases


def _validate_unique(rows: Sequence[tuple[str, float | None]]) -> None:
    """Reject rows with equal label and severity."""
    for name, severity in {row for row in rows if rows.count(row) > 1}:
        at = "" if severity is None else f" at severity {severity:g}"
        raise InputError(f"{name!r}{at}: expected each row once, got it twice")


def perturb(config: Mapping[str, Any], env: BatchedEnv) -> Perturbation:
    """Build the perturbation ``{"name": …, **options}`` for the groups of an env.

    Raises:
        InputError: an unknown name, a wrong option, or one that belongs to training.
        UnfitTokensError: a perturbation that does not fit the tokens.
    """
    validate_no_ramp(config, "each environment plays one episode")
    severity = config.get("severity")
    if isinstance(severity, Sequence):
        raise InputError(
            "perturbation.severity: expected a number outside training, got "
            f"{severity!r}"
        )
    specs = [group.tokens for group in env.groups.values()]
    return make_perturbation(specs=specs, **config)


def label(name: str, options: Mapping[str, Any]) -> str:
    """Return a perturbation's name with the options that differ from its defaults."""
    if name == CLEAN:
        return name
    known = options_of(resolve(name, PERTURBATIONS, "perturbation", Perturbation))
    changed = [
        f"{key}={value}"
        for key, value in options.items()
        if key not in known or known[key].default != value
    ]
    return " ".join([name, *changed])
