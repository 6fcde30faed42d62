"""Recordings of a sensory layer's inputs and codes over episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.selection import take_features
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import UnfitTokensError

SHUFFLED = {"name": "shuffle"}
CANDIDATES = 16
"""Episodes among which the longest one is chosen."""


@dataclass(frozen=True)
class Recording:
    """Steps of episodes, one after the other.

    Attributes:
        codes: ``(steps, C)`` float32.
        inputs: ``(steps, N · F)`` features in the environment's own order.
        envs: copies of the environment before each step; empty if not kept.
    """

    codes: Tensor
    inputs: Tensor
    envs: list[BatchedEnv] = field(default_factory=list)


def record(
    target: EvaluationTarget,
    numbers: Sequence[int],
    *,
    shuffled: bool,
    max_steps: int,
    keep_envs: bool = False,
) -> Recording:
    """Play an episode in each of some evaluation environments.

    Args:
        target: policies of one group, whose first agent is recorded.
        numbers: numbers of the environments, increasing by 1.
        shuffled: permute the tokens at reset.
        max_steps: steps after which an episode is cut.
        keep_envs: keep copies of a single environment, to draw them.
    """
    env = target.make_env(len(numbers), first=numbers[0])
    env.max_steps = min(env.max_steps, max_steps)
    recorder = _Recorder(_rollout(target, env, shuffled), keep_envs)
    recorder.rollout.episodes(on_step=recorder)
    return Recording(
        torch.cat(recorder.codes), torch.cat(recorder.inputs), recorder.envs
    )


def longest(target: EvaluationTarget, max_steps: int) -> int:
    """Return the number of the environment with the longest of `CANDIDATES` episodes.

    Environments of pictures have slow simulators: the first one is taken.
    """
    if is_picture(target):
        return 0
    env = target.make_env(CANDIDATES)
    env.max_steps = min(env.max_steps, max_steps)
    return int(_rollout(target, env, False).episodes().lengths.argmax())


def is_picture(target: EvaluationTarget) -> bool:
    """Return True if tokens are patches of a picture, False if they are readings."""
    (group,) = target.describe().groups.values()
    return group.tokens.dtype == "uint8"


def validate_codes(target: EvaluationTarget) -> None:
    """Reject policies without a sensory layer, and several groups of agents.

    Raises:
        UnfitTokensError: the codes cannot be recorded.
    """
    groups = list(target.policies)
    if len(groups) > 1:
        raise UnfitTokensError(f"expected one group of agents, got {', '.join(groups)}")
    (policy,) = target.policies.values()
    with torch.no_grad():
        if policy.latent(blank_tokens(target, groups[0])) is None:
            kind = type(policy).__name__
            raise UnfitTokensError(f"expected a sensory layer, which {kind} has not")


def blank_tokens(target: EvaluationTarget, group: str) -> Tokens:
    """Return zeros in the shape of one agent's observation."""
    spec = target.describe().groups[group].tokens
    shape = (1, 1, spec.num_tokens)
    types = torch.zeros(shape, dtype=torch.int64, device=target.device)
    features = types.new_zeros(*shape, spec.num_features)
    return Tokens(features.to(getattr(torch, spec.dtype)), types, types.bool())


class _Recorder:
    """Record codes and inputs; ``on_step`` of `Rollout.episodes`."""

    def __init__(self, rollout: Rollout, keep_envs: bool) -> None:
        self.rollout, self.keep_envs = rollout, keep_envs
        (self.group,) = rollout.policies
        self.codes: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.envs: list[BatchedEnv] = []
        self._previous = _first(rollout.env)

    def __call__(self, transition: Transition) -> None:
        tokens, state = transition.tokens[self.group], transition.states[self.group]
        codes = self.rollout.policies[self.group].latent(tokens, state)
        assert codes is not None
        self.codes.append(codes[:, 0].float())
        inputs = _in_order(tokens, self.rollout.perturbation_states.get(self.group, {}))
        self.inputs.append(inputs[:, 0].flatten(1))
        if self.keep_envs:
            self.envs.append(self._previous)
            self._previous = _first(transition.env)


def _first(env: BatchedEnv) -> BatchedEnv:
    """Copy the first environment in its present state."""
    return env.select(torch.zeros(1, dtype=torch.int64, device=env.device))


def _rollout(target: EvaluationTarget, env: BatchedEnv, shuffled: bool) -> Rollout:
    change = perturb(SHUFFLED, env) if shuffled else None
    return Rollout(env, target.policies, perturbation=change)


def _in_order(tokens: Tokens, state: PerturbationState) -> Tensor:
    """Return features in the environment's own order."""
    if "origin" not in state:
        return tokens.features
    return take_features(tokens.features, state["origin"].argsort(-1))
