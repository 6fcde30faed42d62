"""Recordings of a sensory layer's inputs and codes over episodes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.evaluation.video.render import first_env
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, take_features
from marl_pool.trajectory import Transition
from marl_pool.utils.errors import UnfitTokensError

CANDIDATES = 16
"""Episodes among which the longest one is chosen."""


class Recording(NamedTuple):
    """Steps of episodes, one after the other."""

    codes: Tensor
    """``(steps, C)`` float32."""
    inputs: Tensor
    """``(steps, N · F)`` features in the environment's own order."""
    envs: list[BatchedEnv]
    """Copies of the environment before each step; empty if not kept."""


def record(
    target: EvaluationTarget,
    numbers: Sequence[int],
    *,
    shuffled: bool,
    max_steps: int | None = None,
    keep_envs: bool = False,
) -> Recording:
    """Play one episode in each of the given evaluation environments.

    The first agent of the only group is recorded. The numbers of the environments
    increase by 1. ``shuffled`` permutes the tokens at reset, ``max_steps`` truncates
    episodes, and ``keep_envs`` keeps copies of a single environment for drawing.
    """
    env = target.make_env(len(numbers), first=numbers[0])
    rollout = make_rollout(env, target.policies, shuffled, max_steps)
    ((group, policy),) = target.policies.items()
    codes: list[Tensor] = []
    inputs: list[Tensor] = []
    envs = [first_env(env)]

    # Record codes and inputs of the first agent at each step.
    def record_step(transition: Transition) -> None:
        tokens = transition.tokens[group]
        code = policy.latent(tokens, transition.states[group])
        assert code is not None
        codes.append(code[:, 0].float())
        # Undo the shuffle, so that inputs are in the environment's own order.
        state = rollout.perturbation_states.get(group, {})
        features = tokens.features
        if "origin" in state:
            features = take_features(features, state["origin"].argsort(-1))
        inputs.append(features[:, 0].flatten(1))
        if keep_envs:
            envs.append(first_env(transition.env))

    rollout.episodes(on_step=record_step)
    return Recording(torch.cat(codes), torch.cat(inputs), envs[:-1])


def longest(target: EvaluationTarget, max_steps: int) -> int:
    """Return the number of the environment with the longest of `CANDIDATES` episodes.

    Environments with image observations have slow simulators: return the first number.
    """
    if is_picture(target):
        return 0
    env = target.make_env(CANDIDATES)
    rollout = make_rollout(env, target.policies, False, max_steps)
    return int(rollout.episodes().lengths.argmax())


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
    """Return zeros in the shape of one agent's observation, batch ``(1, 1)``."""
    tokens = target.describe().groups[group].tokens.zeros(1)
    return tokens.map(lambda tensor: tensor[None].to(target.device))


def make_rollout(
    env: BatchedEnv,
    policies: Mapping[str, Policy],
    shuffled: bool,
    max_steps: int | None = None,
) -> Rollout:
    """Build a rollout, perhaps of shuffled tokens, that cuts long episodes."""
    env.max_steps = min(env.max_steps, max_steps or env.max_steps)
    perturbation = perturb({"name": "shuffle"}, env) if shuffled else None
    return Rollout(env, policies, perturbation=perturbation)
