"""Perturbed actions: noisy actuators and lost commands."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.perturbations.base import (
    ActionSpace,
    PerturbationState,
    SampledPerturbation,
)
from marl_pool.perturbations.sampling import normal, uniform_like
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens
from marl_pool.utils.devices import constant
from marl_pool.utils.types import NonNegativeFloat, PositiveInt, Severity


@dataclass(kw_only=True, eq=False)
class ActionPerturbation(SampledPerturbation):
    """Change the actions that are executed; observations stay as they are.

    The policy is not told: its memory and the trajectories hold the actions that it
    chose. A subclass implements `change`. The state's ``executed`` are the actions of
    the latest step.

    Args:
        every: steps for which random numbers are held; None: a whole episode.
    """

    every: PositiveInt | None = 1

    @abstractmethod
    def change(
        self,
        actions: Tensor,
        numbers: Tensor,
        spec: ActionSpec,
        state: PerturbationState,
    ) -> Tensor:
        """Change actions, each of which is in the range of ``spec``.

        Args:
            actions: ``(num_envs, agents)`` integers or ``(num_envs, agents, A)``.
            numbers: ``(num_envs, agents, numbers of the spec)`` float64 in (0, 1).
            spec: space of the actions.
            state: ``severity`` ``(num_envs,)`` float64, and ``executed`` if there was
                an earlier action in any episode.
        """

    def size(self, spec: ActionSpec) -> int:
        """Return the number of random numbers for an action."""
        return 1

    @override
    def apply(self, tokens: Tokens, state: PerturbationState) -> Tokens:
        return tokens

    @override
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        return tokens, {**state, "steps": state["steps"] + 1}

    @override
    def act(
        self, actions: Tensor, state: PerturbationState, space: ActionSpace
    ) -> tuple[Tensor, PerturbationState]:
        if self.high == 0:
            return actions, state
        # The observation before this action has been counted.
        spec, steps = ActionSpec.of(space), state["steps"] - 1
        shape = (actions.shape[1], self.size(spec))
        numbers = uniform_like(state["keys"], self.turn(steps), shape)
        changed = self.change(in_range(actions, spec), numbers, spec, state)
        # Unperturbed agents keep their actions bit for bit, even those out of range.
        perturbed = (state["severity"] > 0)[:, None].expand(actions.shape[:2])
        affected = self.affected(steps, actions.shape[1])
        if affected is not None:
            perturbed = perturbed & affected
        executed = torch.where(_like(perturbed, actions), changed, actions)
        return executed, {**state, "executed": executed}


@dataclass(kw_only=True, eq=False)
class ActionNoise(ActionPerturbation):
    """Add noise to continuous actions, or replace discrete ones at random.

    A continuous action becomes ``a + severity * scale * r * ε`` with ``ε ~ N(0, 1)``
    for each dimension and r half the width of its range, clipped to the range. A
    discrete action is replaced with probability ``severity`` by one of all actions, all
    equally likely.

    Source: the two criteria of Tessler, Efroni and Mannor, *Action Robust Reinforcement
    Learning and Applications in Continuous Control* (2019,
    https://arxiv.org/abs/1901.09184), noisy and probabilistic, with random numbers in
    place of an adversary. Difference: noise is added to the whole action and clipped;
    the paper mixes ``(1 - α) a + α ā``.

    Args:
        severity: standard deviation in units of ``scale`` and of half the range; or
            probability of a replacement.
        scale: standard deviation at severity 1, in units of half the range;
            continuous actions only.
    """

    word: ClassVar[str] = "action noise"
    severity: Severity = 0.2
    scale: NonNegativeFloat = 1.0

    @override
    def size(self, spec: ActionSpec) -> int:
        return 2 if spec.discrete else len(spec.low)

    @override
    def change(
        self,
        actions: Tensor,
        numbers: Tensor,
        spec: ActionSpec,
        state: PerturbationState,
    ) -> Tensor:
        severity = state["severity"].view(-1, 1)
        if spec.discrete:
            decision, choice = numbers.unbind(-1)
            random = (choice * spec.n).to(actions.dtype)
            return torch.where(decision < severity, random, actions)
        low, high = _bounds(spec, actions)
        deviation = (severity[..., None] * self.scale).to(actions.dtype)
        errors = normal(numbers).to(actions.dtype) * deviation * (high - low) / 2
        return in_range(actions + errors, spec)


@dataclass(kw_only=True, eq=False)
class DropActions(ActionPerturbation):
    """Lose actions, as a bad link to the actuators does.

    With ``instead="repeat"`` the action that was executed last is executed again: the
    sticky actions of Machado et al., *Revisiting the Arcade Learning Environment*
    (2018, https://arxiv.org/abs/1709.06009, section 5), where severity is their ς. With
    ``instead="zero"``, and where an episode begins with a loss, it is action 0 of a
    discrete space, which is no-op in most environments, or the number nearest to 0 in
    each dimension of a continuous one. ``every=k`` loses k steps in a row.

    Args:
        severity: probability that an action is lost.
        instead: ``"repeat"`` or ``"zero"``.
    """

    word: ClassVar[str] = "dropped actions"
    severity: Severity = 0.25
    instead: Literal["repeat", "zero"] = "repeat"

    @override
    def change(
        self,
        actions: Tensor,
        numbers: Tensor,
        spec: ActionSpec,
        state: PerturbationState,
    ) -> Tensor:
        fallback = in_range(torch.zeros_like(actions), spec)
        if self.instead == "repeat" and "executed" in state:
            begun = (state["steps"] > 1)[:, None]
            fallback = torch.where(_like(begun, actions), state["executed"], fallback)
        lost = numbers[..., 0] < state["severity"].view(-1, 1)
        return torch.where(_like(lost, actions), fallback, actions)


def _like(mask: Tensor, actions: Tensor) -> Tensor:
    """View a mask ``(num_envs, …)`` so that it broadcasts with the actions."""
    return mask.view(*mask.shape, *[1] * (actions.dim() - mask.dim()))


def _bounds(spec: ActionSpec, actions: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (
        constant(bounds, actions.device, actions.dtype)
        for bounds in (spec.low, spec.high)
    )
    return low, high


def in_range(actions: Tensor, spec: ActionSpec) -> Tensor:
    """Clip actions to the bounds of a Box; discrete ones are returned as they are."""
    return actions if spec.discrete else actions.clamp(*_bounds(spec, actions))
