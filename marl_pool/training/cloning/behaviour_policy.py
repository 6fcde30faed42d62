"""The policy that acts while trajectories are collected, labelled by the teacher."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.recorder import StepRecorder
from marl_pool.training.cloning.teacher import Teacher
from marl_pool.utils.randomness import Stream


class BehaviourPolicy(Policy):
    r"""Mixture of teacher, student and random actions; the teacher labels every step.

    Each agent's action is the teacher's with probability :math:`\beta` and the
    student's otherwise, and is then replaced by a uniformly random one with probability
    ``noise``. The teacher sees the unperturbed observation, the student the perturbed
    one. Recurrent policies are stepped even when another policy acts, and receive the
    executed action.

    Source: the mixture policy of DAgger, Ross et al. (2011),
    https://arxiv.org/abs/1011.0686.

    Args:
        teacher: labels every step.
        spec: specification of the group's tokens.
        action_space: action space of one agent.
        group: name of the group.
        recorder: stores observations, actions and labels.
        student: acts where the teacher does not; None: the teacher always acts.
        beta: probability of the teacher's action, in [0, 1].
        noise: probability of a random action, in [0, 1].
        device: device of the environments.
    """

    rollout: Rollout
    """Rollout of the policy, to be set before the first step."""

    def __init__(
        self,
        teacher: Teacher,
        spec: TokenSpec,
        action_space: spaces.Space,
        *,
        group: str,
        recorder: StepRecorder,
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
        self.beta, self.noise_probability = beta, noise
        # Random numbers of a step: teacher or student, random or not, a random action,
        # then the teacher's own.
        self._own = 2 + self.actions.noise_size
        self.noise_size = self._own + teacher.noise_size

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        size = (num_envs, num_agents)
        student = self.student and self.student.initial_state(*size, num_tokens)
        return {
            "prev_action": torch.zeros(*size, self.actions.dim, device=self.device),
            "teacher": self.teacher.initial_state(*size, self.spec.num_tokens),
            "student": () if student is None else student,
        }

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        env = self.rollout.env
        perturbed = self.rollout.perturbation is not None
        observed = env.observe()[self.group] if perturbed else tokens
        # Use a fixed count of random numbers a step, whatever beta and noise are.
        numbers = self.noise(tokens, generator)
        own, others = numbers.split([self._own, self.teacher.noise_size], dim=-1)
        # Label the unperturbed observation.
        answer = self.teacher.label(
            env, observed, state["teacher"], _SampledNumbers(others.flatten(1))
        )
        label = to_unit(self.actions, answer.action)
        # Choose the teacher's or the student's action.
        action, student = label, ()
        if self.student is not None:
            decision = self.student.act(tokens, state["student"])
            by_teacher = own[..., 0] < self.beta
            action = _where(by_teacher, label, decision.action)
            student = decision.state
        # Replace some actions by random ones.
        random = own[..., 1] < self.noise_probability
        action = _where(random, self._random(own[..., 2:]), action)
        self.recorder.add(
            env, env.active[self.group], observed, state["prev_action"], label, answer
        )
        # Pass the executed action to both memories.
        prev_action = self.actions.to_vectors(action).float()
        state = {
            "prev_action": prev_action,
            "teacher": _with_executed(answer.state, prev_action),
            "student": _with_executed(student, prev_action),
        }
        none = torch.zeros_like(prev_action[..., 0])
        return Decision(action, none, none, prev_action, state)

    @override
    def scale(self, action: Tensor) -> Tensor:
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


class _SampledNumbers(Stream):
    """Stream that returns the same, already sampled numbers at each call."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def next(self) -> Tensor:
        return self._numbers


def to_unit(actions: ActionSpec, action: Tensor) -> Tensor:
    """Map the bounds of a box to [-1, 1], clipped; keep a discrete action."""
    if actions.discrete:
        return action
    low, high = (action.new_tensor(bound) for bound in (actions.low, actions.high))
    return ((action - low) * (2 / (high - low)) - 1).clamp(-1, 1)


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(*rows.shape, *[1] * (one.dim() - 2)), one, other)


def _with_executed(state: Any, prev_action: Tensor) -> Any:
    """Replace the previous action in a memory by the executed one."""
    if isinstance(state, dict) and "action" in state:
        return {**state, "action": prev_action.to(state["action"])}
    return state
