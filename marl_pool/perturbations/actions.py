"""Perturbed actions: noisy actuators and lost commands."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from marl_pool.options.names import resolve
from marl_pool.options.types import Episodes, NonNegativeFloat, Severity
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.base import (
    ActionSpace,
    Perturbation,
    PerturbationState,
    SampledPerturbation,
)
from marl_pool.perturbations.sampling import normal, uniform_like
from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, form_of, like
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError


@dataclass(kw_only=True, eq=False)
class ActionPerturbation(SampledPerturbation):
    """Change the actions that are executed; observations stay as they are.

    The policy is not told: its memory and the trajectories hold the actions that it
    chose. A subclass implements `change`. The state's ``executed`` are the actions of
    the latest step.

    Args:
        every: steps for which random numbers are held, or None for a whole episode.
    """

    every: Episodes | None = 1

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
            actions: ``(num_envs, agents, …)``; see `ActionSpec`.
            numbers: ``(num_envs, agents, numbers of the spec)`` float64 in (0, 1).
            spec: space of the actions.
            state: ``severity`` ``(num_envs,)`` float64; ``executed`` if there was an
                earlier action in any episode; ``allowed``, the action mask, if the
                environment has one.
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
        present = ~tokens.padding.all(-1)
        state = {**state, "steps": state["steps"] + 1, "present": present}
        if tokens.action_mask is not None:
            state["allowed"] = tokens.action_mask
        return tokens, state

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
        changed = self.change(spec.clip(actions), numbers, spec, state)
        self._validate_changed(changed, actions)
        # Unperturbed agents keep their actions bit for bit, even those out of range.
        perturbed = (state["severity"] > 0)[:, None].expand(actions.shape[:2])
        affected = self.affected(steps, actions.shape[1])
        if affected is not None:
            perturbed = perturbed & affected
        executed = torch.where(like(perturbed, actions), changed, actions)
        done = executed
        if "present" in state:
            # What an agent does before it arrives is nothing to repeat.
            nothing = spec.clip(torch.zeros_like(executed))
            done = torch.where(like(state["present"], executed), executed, nothing)
        return executed, {**state, "executed": done}

    def _validate_changed(self, changed: object, actions: Tensor) -> None:
        expected, actual = form_of(actions), form_of(changed)
        if actual != expected:
            raise InputError(
                f"perturbation {type(self).__name__!r}: expected change() to return "
                f"{expected}, got {actual}"
            )


def changes_actions(name: str) -> bool:
    """Return whether a perturbation, a name or ``package.module:Class``, is of actions.

    Raises:
        InputError: an unknown name.
    """
    cls = resolve(name, PERTURBATIONS, "perturbation", Perturbation)
    return issubclass(cls, ActionPerturbation)


@dataclass(kw_only=True, eq=False)
class ActionNoise(ActionPerturbation):
    """Add noise to continuous actions, or replace discrete ones at random.

    A continuous action becomes ``a + severity * scale * r * ε`` with ``ε ~ N(0, 1)``
    for each dimension and r half the width of its range, clipped to the range. A
    discrete action is replaced with probability ``severity`` by one sampled uniformly
    from all allowed actions. Several choices are replaced independently.

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

    label: ClassVar[str] = "action noise"
    severity: Severity = 0.2
    scale: NonNegativeFloat = 1.0

    @override
    def size(self, spec: ActionSpec) -> int:
        return 2 * len(spec.sizes) + len(spec.low)

    @override
    def change(
        self,
        actions: Tensor,
        numbers: Tensor,
        spec: ActionSpec,
        state: PerturbationState,
    ) -> Tensor:
        severity, count = state["severity"].view(-1, 1), len(spec.sizes)
        if spec.discrete:
            decision, choice = numbers.unbind(-1)
            random = _random_options(choice[..., None], spec, state)[..., 0]
            return torch.where(decision < severity, random.to(actions.dtype), actions)
        changed = actions
        if count:
            decision, choice = numbers[..., :count], numbers[..., count : 2 * count]
            random = _random_options(choice, spec, state).to(actions.dtype)
            hit = decision < severity[..., None]
            choices = torch.where(hit, random, actions[..., :count])
            changed = torch.cat([choices, actions[..., count:]], -1)
        if spec.integral:
            return changed
        # Choices have no error.
        low, high = (constant(b, actions.device, actions.dtype) for b in spec.bounds)
        deviation = (severity[..., None] * self.scale).to(actions.dtype)
        errors = normal(numbers[..., 2 * count :]).to(actions.dtype) * deviation
        errors = pad(errors, (count, 0)) * (high - low) / 2
        return spec.clip(changed + errors)


@dataclass(kw_only=True, eq=False)
class DropActions(ActionPerturbation):
    """Lose actions, like an unreliable link to the actuators.

    With ``instead="repeat"`` the last executed action is executed again: the sticky
    actions of Machado et al., *Revisiting the Arcade Learning Environment* (2018,
    https://arxiv.org/abs/1709.06009, section 5), where severity is their ς. With
    ``instead="zero"``, or if an episode begins with a loss, the action is option 0 of
    each choice, which is a no-op in most environments, and the number nearest to 0 in
    each dimension of a continuous space. An option that is not allowed is replaced by
    the first one that is. ``every=k`` loses actions in blocks of k steps.

    Args:
        severity: probability that an action is lost.
        instead: ``"repeat"`` or ``"zero"``.
    """

    label: ClassVar[str] = "dropped actions"
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
        fallback = spec.clip(torch.zeros_like(actions))
        if self.instead == "repeat" and "executed" in state:
            begun = (state["steps"] > 1)[:, None]
            fallback = torch.where(like(begun, actions), state["executed"], fallback)
        if "allowed" in state:
            fallback = _first_allowed(fallback, spec, state["allowed"])
        lost = numbers[..., 0] < state["severity"].view(-1, 1)
        return torch.where(like(lost, actions), fallback, actions)


def _random_options(
    numbers: Tensor, spec: ActionSpec, state: PerturbationState
) -> Tensor:
    """Return an option of each choice by ``numbers`` ``(*B, K)`` in (0, 1)."""
    if "allowed" not in state:
        sizes = constant(spec.sizes, numbers.device)
        return (numbers * sizes).long()
    # The option with that number among the allowed ones; absent agents have none.
    counts = spec.table(state["allowed"], False).cumsum(-1)
    number = (numbers * counts[..., -1]).long() + 1
    return (counts < number[..., None]).sum(-1) % counts.shape[-1]


def _first_allowed(actions: Tensor, spec: ActionSpec, mask: Tensor) -> Tensor:
    """Replace options that are not allowed by the first one that is."""
    first = spec.table(mask, False).byte().argmax(-1).to(actions.dtype)
    allowed = spec.allowed(actions, mask)
    if spec.discrete:
        return torch.where(allowed[..., 0], actions, first[..., 0])
    count = len(spec.sizes)
    choices = torch.where(allowed, actions[..., :count], first)
    return torch.cat([choices, actions[..., count:]], -1)
