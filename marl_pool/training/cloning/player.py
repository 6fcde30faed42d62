"""Who plays while trajectories are collected, labelled by the teacher."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.randomness import Stream
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.recorder import Recorder
from marl_pool.training.cloning.teacher import Teacher


class Player(Policy):
    """Teacher, student or chance, one of them in each step; the teacher labels all.

    The teacher sees what the world shows, the student what the rollout's perturbation
    leaves of it. Whoever remembers runs along in the steps that others take, and is
    told what was truly done.

    Args:
        teacher: says what should be done.
        spec: of what the world shows the group.
        action_space: of one agent.
        group: whom it plays.
        recorder: takes down what was seen, done and said.
        student: plays where the teacher does not; None: the teacher always plays.
        beta: probability that a step is the teacher's.
        noise: probability that a step's action is random.
        device: where the worlds live.
    """

    rollout: Rollout
    """That it plays in, to be set before the first step."""

    def __init__(
        self,
        teacher: Teacher,
        spec: TokenSpec,
        action_space: spaces.Space,
        *,
        group: str,
        recorder: Recorder,
        student: Policy | None = None,
        beta: float = 0.0,
        noise: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.teacher, self.spec, self.group = teacher, spec, group
        self.device = device
        self.actions = ActionSpec.of(action_space)
        self.recorder, self.student = recorder, student
        self.beta, self.noise_share = beta, noise
        # Whose step it is, whether it is random, a random action, the teacher's own.
        self._own = 2 + self.actions.noise_size
        self.noise_size = self._own + teacher.noise_size

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Memories of teacher and student, and the action before."""
        size = (num_envs, num_agents)
        student = self.student and self.student.initial_state(*size, num_tokens)
        return {
            "before": torch.zeros(*size, self.actions.dim, device=self.device),
            "teacher": self.teacher.initial_state(*size, self.spec.num_tokens),
            "student": () if student is None else student,
        }

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Play and take down one step; see `Policy.act`."""
        world = self.rollout.world
        perturbed = self.rollout.perturbation is not None
        shown = world.observe()[self.group] if perturbed else tokens
        numbers = self.noise(tokens, generator)
        own, others = numbers.split([self._own, self.teacher.noise_size], dim=-1)
        answer = self.teacher.answer(
            world, shown, state["teacher"], _Drawn(others.flatten(1))
        )
        label = to_unit(self.actions, answer.action)
        action, student = label, ()
        if self.student is not None:
            decision = self.student.act(tokens, state["student"])
            mine = own[..., 0] < self.beta
            action = _where(mine, label, decision.action)
            student = decision.state
        random = own[..., 1] < self.noise_share
        action = _where(random, self._random(own[..., 2:]), action)
        self.recorder.add(
            world, world.active[self.group], shown, state["before"], label, answer
        )
        before = self.actions.to_vectors(action).float()
        state = {
            "before": before,
            "teacher": _told(answer.state, before),
            "student": _told(student, before),
        }
        none = torch.zeros_like(before[..., 0])
        return Decision(action, none, none, before, state)

    def scale(self, action: Tensor) -> Tensor:
        """From [-1, 1] to the bounds of the box; a choice stays as it is."""
        if self.actions.discrete:
            return action
        low, high = (
            action.new_tensor(bound) for bound in (self.actions.low, self.actions.high)
        )
        return low + (action + 1) * ((high - low) / 2)

    def _random(self, numbers: Tensor) -> Tensor:
        if self.actions.discrete:
            return (numbers[..., 0] * self.actions.n).long()
        return 2 * numbers - 1


class _Drawn(Stream):
    """Numbers that were drawn already, in the form in which policies take them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def next(self) -> Tensor:
        return self._numbers


def to_unit(actions: ActionSpec, action: Tensor) -> Tensor:
    """From the env's units to the policy's: a box to [-1, 1], clipped."""
    if actions.discrete:
        return action
    low, high = (action.new_tensor(bound) for bound in (actions.low, actions.high))
    return ((action - low) * (2 / (high - low)) - 1).clamp(-1, 1)


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(*rows.shape, *[1] * (one.dim() - 2)), one, other)


def _told(state: Any, before: Tensor) -> Any:
    """A memory that holds the previous action, with the one that was truly taken."""
    if isinstance(state, dict) and "action" in state:
        return {**state, "action": before.to(state["action"])}
    return state
