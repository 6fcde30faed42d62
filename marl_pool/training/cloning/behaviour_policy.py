"""The policy that acts while trajectories are collected, labelled by the teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Decision, Policy, SpecifiedPolicy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.recorder import RowTable, StepRecorder
from marl_pool.training.cloning.teacher import Teacher
from marl_pool.training.cloning.trajectories import Trajectories, cut
from marl_pool.utils.randomness import Stream


@dataclass(frozen=True)
class Roles:
    """Roles of an environment's groups.

    Attributes:
        group: name of the cloned group.
        teacher: labels the group's steps; None where trajectories are given.
        others: policies of the other groups, by name.
    """

    group: str
    teacher: Teacher | None
    others: Mapping[str, Policy]


class BehaviourPolicy(SpecifiedPolicy):
    r"""Mixture of teacher, student and random actions; the teacher labels every step.

    Each agent's action is the teacher's with probability :math:`\beta` and the
    student's otherwise, and is then replaced by a uniformly random one with probability
    ``noise``. The teacher sees the unperturbed observation, the student the perturbed
    one. Recurrent policies are stepped even when another policy acts, and receive the
    executed action.

    Source: the mixture policy of DAgger, Ross et al. (2011),
    https://arxiv.org/abs/1011.0686.

    Args:
        roles: the cloned group, its teacher, and the policies of the other groups.
        env: environments to play in.
        rows: table of distinct features, extended here; for uint8 features only.
        student: acts where the teacher does not; None: the teacher always acts.
        perturbation: perturbation of the student's observations.
        beta: probability of the teacher's action, in [0, 1].
        noise: probability of a random action, in [0, 1].
    """

    def __init__(
        self,
        roles: Roles,
        env: BatchedEnv,
        rows: RowTable | None,
        student: Policy | None = None,
        perturbation: Perturbation | None = None,
        *,
        beta: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        assert roles.teacher is not None
        group = env.groups[roles.group]
        super().__init__(group.tokens, group.action_space)
        self.to(env.device)
        self.teacher, self.student, self.group = roles.teacher, student, roles.group
        self.beta, self.noise_probability = beta, noise
        self.recorder = StepRecorder(self.actions.discrete, rows)
        # Random numbers of a step: teacher or student, random or not, a random action,
        # then the teacher's own.
        self._own = 2 + self.actions.noise_size
        self.noise_size = self._own + self.teacher.noise_size
        self.env_ids = env.env_ids
        # This policy acts for the cloned group of a rollout of its own.
        policies = {**roles.others, roles.group: self}
        self.rollout = Rollout(env, policies, perturbation=perturbation)

    def episodes(self) -> Trajectories:
        """Play one episode in each environment."""
        return self._recorded(self.rollout.episodes().returns[self.group])

    def advance(self, steps: int) -> Trajectories:
        """Take more steps in each environment; returns sum the rewards of these."""
        return self._recorded(self.rollout.advance(steps)[self.group])

    def _recorded(self, returns: Tensor) -> Trajectories:
        rows = self.recorder.rows
        table = None if rows is None else rows.table()
        return cut(self.recorder.pop(), self.env_ids, returns, table)

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        size = (num_envs, num_agents)
        student = self.student and self.student.initial_state(*size, num_tokens)
        return {
            "begins": self.low.new_ones(size, dtype=torch.bool),
            "prev_action": self.low.new_zeros(*size, self.actions.dim),
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
        answer = answer._replace(action=self._to_unit(answer.action))
        # Choose the teacher's or the student's action.
        action, student = answer.action, ()
        if self.student is not None:
            decision = self.student.act(tokens, state["student"])
            by_teacher = own[..., 0] < self.beta
            action = _where(by_teacher, action, decision.action)
            student = decision.state
        # Replace some actions by random ones.
        random = own[..., 1] < self.noise_probability
        action = _where(random, self._random(own[..., 2:]), action)
        active, before = env.active[self.group], state["prev_action"]
        self.recorder.add(env, active, observed, before, state["begins"], answer)
        # Pass the executed action to both memories.
        prev_action = self.actions.to_vectors(action).float()
        state = {
            "begins": torch.zeros_like(state["begins"]),
            "prev_action": prev_action,
            "teacher": _with_executed(answer.state, prev_action),
            "student": _with_executed(student, prev_action),
        }
        none = torch.zeros_like(prev_action[..., 0])
        # Log-probabilities, values and logits are not needed here.
        return Decision(action, none, none, prev_action, state)

    def _to_unit(self, action: Tensor) -> Tensor:
        """Invert `scale`, clipped to [-1, 1]."""
        if self.actions.discrete:
            return action
        return ((action - self.low) * (2 / (self.high - self.low)) - 1).clamp(-1, 1)

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


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(*rows.shape, *[1] * (one.dim() - 2)), one, other)


def _with_executed(state: Any, prev_action: Tensor) -> Any:
    """Replace the previous action in a memory by the executed one."""
    if isinstance(state, dict) and "action" in state:
        return {**state, "action": prev_action.to(state["action"])}
    return state
