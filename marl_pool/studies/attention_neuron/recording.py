"""Episodes of a policy with a sensory layer: what it saw, and its codes."""

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
"""Episodes of which the longest one is looked at."""


@dataclass(frozen=True)
class Recording:
    """Steps of some episodes, one after the other.

    Attributes:
        codes: ``(steps, C)`` float32.
        inputs: ``(steps, N · F)`` features in the world's own order.
        worlds: as each stood when the policy decided; empty if they were not kept.
    """

    codes: Tensor
    inputs: Tensor
    worlds: list[BatchedEnv] = field(default_factory=list)


def record(
    subject: EvaluationTarget,
    numbers: Sequence[int],
    *,
    shuffled: bool,
    max_steps: int,
    keep_worlds: bool = False,
) -> Recording:
    """Play an episode in each of some evaluation worlds.

    Args:
        subject: of one group; its first agents are recorded.
        numbers: of the worlds, in order.
        shuffled: permute the tokens at reset.
        max_steps: steps after which an episode is cut.
        keep_worlds: whether worlds are needed, to be drawn; for a single one.
    """
    env = subject.make_env(len(numbers), first=numbers[0])
    env.max_steps = min(env.max_steps, max_steps)
    recorder = _Recorder(_rollout(subject, env, shuffled), keep_worlds)
    recorder.rollout.episodes(on_step=recorder)
    return Recording(
        torch.cat(recorder.codes), torch.cat(recorder.inputs), recorder.worlds
    )


def longest(subject: EvaluationTarget, max_steps: int) -> int:
    """The number of the world, of the first few, whose episode is the longest.

    One alone where worlds are pictures: their simulators are slow.
    """
    if is_picture(subject):
        return 0
    env = subject.make_env(CANDIDATES)
    env.max_steps = min(env.max_steps, max_steps)
    return int(_rollout(subject, env, False).episodes().lengths.argmax())


def is_picture(subject: EvaluationTarget) -> bool:
    """Whether tokens are patches of a picture, not readings."""
    (group,) = subject.make_env(1).groups.values()
    return group.tokens.dtype == "uint8"


def require_codes(subject: EvaluationTarget) -> None:
    """Refuse policies without a sensory layer, and several groups of agents.

    Raises:
        UnfitTokensError: such a one.
    """
    groups = list(subject.policies)
    if len(groups) > 1:
        raise UnfitTokensError(f"expected one group of agents, got {', '.join(groups)}")
    (policy,) = subject.policies.values()
    with torch.no_grad():
        if policy.latent(blank_tokens(subject, groups[0])) is None:
            kind = type(policy).__name__
            raise UnfitTokensError(f"expected a sensory layer, which {kind} has not")


def blank_tokens(subject: EvaluationTarget, group: str) -> Tokens:
    """Zeros in the form of what one agent sees, without playing anything."""
    spec = subject.make_env(1).groups[group].tokens
    shape = (1, 1, spec.num_tokens)
    types = torch.zeros(shape, dtype=torch.int64, device=subject.device)
    features = types.new_zeros(*shape, spec.num_features)
    return Tokens(features.to(getattr(torch, spec.dtype)), types, types.bool())


class _Recorder:
    """A hook for `Rollout.episodes`."""

    def __init__(self, rollout: Rollout, keep_worlds: bool) -> None:
        self.rollout, self.keep_worlds = rollout, keep_worlds
        (self.group,) = rollout.policies
        self.codes: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.worlds: list[BatchedEnv] = []
        self._before = _first(rollout.env)

    def __call__(self, transition: Transition) -> None:
        tokens, state = transition.tokens[self.group], transition.states[self.group]
        codes = self.rollout.policies[self.group].latent(tokens, state)
        assert codes is not None
        self.codes.append(codes[:, 0].float())
        inputs = _in_order(tokens, self.rollout.perturbed.get(self.group, {}))
        self.inputs.append(inputs[:, 0].flatten(1))
        if self.keep_worlds:
            self.worlds.append(self._before)
            self._before = _first(transition.env)


def _first(env: BatchedEnv) -> BatchedEnv:
    """The first world as it stands now."""
    return env.select(torch.zeros(1, dtype=torch.int64, device=env.device))


def _rollout(subject: EvaluationTarget, env: BatchedEnv, shuffled: bool) -> Rollout:
    change = perturb(SHUFFLED, env) if shuffled else None
    return Rollout(env, subject.policies, perturbation=change)


def _in_order(tokens: Tokens, state: PerturbationState) -> Tensor:
    """Features in the world's own order."""
    if "origin" not in state:
        return tokens.features
    return take_features(tokens.features, state["origin"].argsort(-1))
