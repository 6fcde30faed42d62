"""Cases of an evaluation, each of policies under one condition, and their episodes."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.callable_policy import CallablePolicy
from marl_pool.evaluation.results import CLEAN, TRAINED, TRANSFER, Result
from marl_pool.evaluation.settings import PerturbationLevels
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.perturbations import PERTURBATIONS, make_perturbation
from marl_pool.perturbations.base import (
    Perturbation,
    SampledPerturbation,
    validate_no_ramp,
)
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.trajectory import Transition
from marl_pool.utils.errors import InputError, UnfitTokensError

SIMULATORS = 32
"""Maximum number of environments stepped at once, if each is a simulator."""
EpisodeReturns = dict[str, np.ndarray]
"""``(episodes,)`` float64 returns by group, mean over the group's agents, in order of
the environments."""


@dataclass(frozen=True)
class TransferEnv:
    """An environment that differs from the one of all other cases.

    Attributes:
        label: label of its row.
        env: options of the env that differ.
        make: factory of the environments, numbered as in the other cases.
        policies: policies by group, rescaled if the row asks for it.
        baselines: other policies by name, which play in it too.
        missing: why it cannot be played; empty if it can.
        options: other settings of the row, if they differ from the defaults.
    """

    label: str
    env: Mapping[str, Any]
    make: Callable[[], BatchedEnv]
    policies: Mapping[str, Policy]
    baselines: Mapping[str, Mapping[str, Policy]] = field(default_factory=dict)
    missing: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Policies under one condition, each of which plays the same episodes.

    Attributes:
        policy: ``"trained"`` or the name of a baseline.
        policies: policies by group.
        explore: sample actions.
        perturbation: None for clean episodes, or if it does not fit the tokens.
        name: name of the perturbation, ``"clean"`` or ``"transfer"``.
        options: options of the perturbation, without severity.
        severity: severity in [0, 1].
        transfer: the other environment, if it is one.
        missing: why it cannot be played; empty if it can.
        exact: the policies have their original precision, not float32.
        hidden: played for comparison only, without a row.
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

    @property
    def end(self) -> int | None:
        """Step from which the perturbation is over, or None if it lasts."""
        perturbation = self.perturbation
        if isinstance(perturbation, SampledPerturbation):
            return perturbation.end
        return None

    @property
    def title(self) -> str:
        """Its label and severity, for messages."""
        if self.transfer:
            return repr(self.transfer.label)
        return f"{label(self.name, self.options)!r} at severity {self.severity}"

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
            options=dict(transfer.options if transfer else self.options),
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
    # Build every perturbation, which checks its options before anything is played.
    perturbed = []
    for levels in perturbations:
        name, options = levels.name, levels.options
        for severity in levels.severities:
            case = Case(
                TRAINED, policies, name=name, options=options, severity=severity
            )
            # A perturbation that does not fit the tokens leaves a reason in its rows.
            try:
                config = {"name": name, **options, "severity": severity}
                perturbation = perturb(config, env)
                if reason := _misfit(policies, perturbation):
                    raise UnfitTokensError(reason)
                perturbed.append(replace(case, perturbation=perturbation))
            except UnfitTokensError as error:
                perturbed.append(replace(case, missing=str(error)))
    # A transfer environment is another task, without a perturbation.
    transfer_cases = [
        Case(
            TRAINED,
            transfer.policies,
            name=TRANSFER,
            transfer=transfer,
            missing=transfer.missing,
        )
        for transfer in transfers
    ]
    # Reports identify rows by label and severity, and unperturbed ones by theirs.
    if any(transfer.label == CLEAN for transfer in transfers):
        raise InputError(
            f"transfer: expected a label other than that of unperturbed rows, got "
            f"{CLEAN!r}"
        )
    counts = Counter(case.title for case in [*perturbed, *transfer_cases])
    for row, count in counts.items():
        if count > 1:
            raise InputError(f"{row}: expected each row once, got it twice")
    return [Case(TRAINED, policies), *perturbed, *transfer_cases]


def _misfit(policies: Mapping[str, Policy], perturbation: Perturbation) -> str:
    """Return why a policy's observation space cannot express a perturbation, or ""."""
    foreign = (
        policy for policy in policies.values() if isinstance(policy, CallablePolicy)
    )
    return next(filter(None, (policy.misfit(perturbation) for policy in foreign)), "")


def perturb(config: Mapping[str, Any], env: BatchedEnv) -> Perturbation:
    """Build the perturbation ``{"name": …, **options}`` for the groups of an env.

    Raises:
        InputError: an unknown name, a wrong option, or one for training only.
        UnfitTokensError: a perturbation that does not fit the tokens.
    """
    validate_no_ramp(config, "each environment plays one episode")
    severity = config.get("severity")
    if isinstance(severity, Sequence):
        raise InputError(
            "perturbation.severity: expected a number outside training, got "
            f"{severity!r}"
        )
    specs = {name: group.tokens for name, group in env.groups.items()}
    return make_perturbation(specs=specs, **config)


def label(name: str, options: Mapping[str, Any]) -> str:
    """Return a perturbation's name with the options that differ from its defaults."""
    if name == CLEAN:
        return name
    parameters = options_of(resolve(name, PERTURBATIONS, "perturbation", Perturbation))
    changed = [
        f"{key}={value}"
        for key, value in options.items()
        if key not in parameters or parameters[key].default != value
    ]
    return " ".join([name, *changed])


class Played(NamedTuple):
    """Returns of episodes."""

    returns: EpisodeReturns
    after: dict[int, EpisodeReturns]
    """By step of the episode, sums of the rewards in it and in all later steps."""


def play(
    policies: Mapping[str, Policy],
    env: BatchedEnv,
    perturbation: Perturbation | None = None,
    *,
    explore: bool = False,
    draw: int = 0,
    after: Collection[int] = (),
) -> Played:
    """Play one episode in every environment.

    Args:
        policies: policies by group, in eval mode.
        env: environments to reset. Equal numbers and seeds give equal episodes.
        perturbation: applied between environment and policies.
        explore: sample actions instead of taking the most likely ones.
        draw: number of the perturbation's sample; see `Rollout`.
        after: steps of an episode from which to sum rewards as well.
    """
    returns = []
    later: dict[int, list[dict[str, Tensor]]] = {step: [] for step in after}
    rows = torch.arange(env.num_envs, device=env.device)
    for chunk in rows.split(SIMULATORS) if env.simulated else (rows,):
        rollout = Rollout(
            env if len(chunk) == env.num_envs else env.select(chunk),
            policies,
            perturbation=perturbation,
            explore=explore,
            draw=draw,
        )
        tails = _Tails(rollout, after)
        episodes = rollout.episodes(tails if after else None)
        returns.append(episodes.means())
        for step, sums in tails.sums.items():
            later[step].append(episodes._replace(returns=sums).means())
    return Played(
        _joined(returns), {step: _joined(means) for step, means in later.items()}
    )


class _Tails:
    """Sums of each environment's rewards from some steps on, for `Rollout.episodes`."""

    def __init__(self, rollout: Rollout, after: Collection[int]) -> None:
        self.env_ids = rollout.env.env_ids
        # Steps begun by each agent: where agents take turns, a perturbation counts
        # their own turns only.
        self.begun = {name: part.long() for name, part in _counting(rollout.env)}
        self.sums: dict[int, dict[str, Tensor]] = {
            step: {
                name: self.env_ids.new_zeros(
                    (len(self.env_ids), group.num_agents), dtype=torch.float64
                )
                for name, group in rollout.env.groups.items()
            }
            for step in after
        }

    def __call__(self, transition: Transition) -> None:
        # Numbers of environments increase; those that are over have been dropped.
        rows = torch.searchsorted(self.env_ids, transition.env.env_ids)
        for step, sums in self.sums.items():
            for name, rewards in transition.step.rewards.items():
                later = self.begun[name][rows] > step
                sums[name].index_add_(0, rows, rewards.double() * later)
        for name, counting in _counting(transition.env):
            self.begun[name].index_add_(0, rows, counting.long())


def _counting(env: BatchedEnv) -> Iterable[tuple[str, Tensor]]:
    """Return, for each group, the agents for which the next step counts."""
    return [
        (name, active if env.turn_based else torch.ones_like(active))
        for name, active in env.active.items()
    ]


def _joined(chunks: Sequence[Mapping[str, Tensor]]) -> EpisodeReturns:
    """Concatenate the returns of chunks of environments, by group."""
    return {
        name: torch.cat([chunk[name] for chunk in chunks]).cpu().numpy()
        for name in chunks[0]
    }
