"""The policy that acts while trajectories are collected, labelled by the teacher."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Decision, Policy, SpecifiedPolicy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.teacher import Roles, TeacherLabel
from marl_pool.training.cloning.trajectories import (
    NO_ACTION,
    RowTable,
    Trajectories,
    cut,
)
from marl_pool.utils.randomness import Stream


class BehaviourPolicy(SpecifiedPolicy):
    """The teacher or a student at play; the teacher labels every step.

    The teacher sees the unperturbed observation, the student the perturbed one. A
    recurrent teacher is stepped even when the student acts, and receives the executed
    action.

    Args:
        roles: the cloned group, its teacher, and the policies of the other groups.
        env: environments to play in.
        rows: table of distinct features, extended here; for uint8 features only.
        student: policy that acts; None: the teacher acts.
        perturbation: perturbation of the student's observations.
    """

    def __init__(
        self,
        roles: Roles,
        env: BatchedEnv,
        rows: RowTable | None,
        student: Policy | None = None,
        perturbation: Perturbation | None = None,
    ) -> None:
        group = env.groups[roles.group]
        super().__init__(group.tokens, group.action_space)
        self.to(env.device)
        self.teacher, self.student, self.group = roles.teacher, student, roles.group
        self.rows, self.recorded = rows, defaultdict[str, list[Tensor]](list)
        self.noise_size = self.teacher.noise_size
        self.env_ids = env.env_ids
        # This policy acts for the cloned group of a rollout of its own.
        policies = {**roles.others, roles.group: self}
        self.rollout = Rollout(env, policies, perturbation=perturbation)

    def episodes(self) -> Trajectories:
        """Play one episode in each environment."""
        return self._pop(self.rollout.episodes().returns[self.group])

    def advance(self, steps: int) -> Trajectories:
        """Take more steps in each environment; returns sum the rewards of these."""
        return self._pop(self.rollout.advance(steps)[self.group])

    def _pop(self, returns: Tensor) -> Trajectories:
        """Return and forget what was recorded."""
        steps = {name: torch.cat(parts) for name, parts in self.recorded.items()}
        self.recorded.clear()
        return cut(steps, self.env_ids, returns, self.rows)

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
        # Label the unperturbed observation.
        answer = self.teacher.label(env, observed, state["teacher"], generator)
        answer = answer._replace(action=self._to_unit(answer.action))
        # The student acts, if there is one.
        action, student = answer.action, ()
        if self.student is not None:
            decision = self.student.act(tokens, state["student"])
            action, student = decision.action, decision.state
        self._record(observed, state, answer)
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

    def _record(self, tokens: Tokens, state: Any, answer: TeacherLabel) -> None:
        """Record a step of the agents alive, before the environments take it."""
        env, active = self.rollout.env, self.rollout.env.active[self.group]
        features, label = tokens.features, answer.action
        prev_action, begins = state["prev_action"], state["begins"]
        # Store numbers in place of byte rows and of one-hot vectors.
        if self.rows is not None:
            features = self.rows.number(features)
        if self.actions.discrete:
            prev_action = prev_action.argmax(-1).masked_fill(begins, NO_ACTION).short()
            label = label.short()
        # Give the numbers of environments and agents the shape of the active mask.
        shape = active.shape
        step = {
            "env": env.env_ids[:, None].expand(shape),
            "episode": env.episodes[:, None].expand(shape),
            "time": env.steps[:, None].expand(shape),
            "agent": torch.arange(shape[1], device=active.device).expand(shape),
            "features": features,
            "types": tokens.types.byte(),
            "padding": tokens.padding,
            "prev_action": prev_action,
            "begins": begins,
            "label": label,
        }
        # Logits and privileged targets depend on the teacher.
        if answer.logits is not None:
            step["logits"] = answer.logits.float()
        if answer.privileged_targets is not None:
            step["privileged_targets"] = answer.privileged_targets.float()
        # Copy to main memory: environments change their tensors in place.
        for name, part in step.items():
            self.recorded[name].append(part.to("cpu", copy=True)[active.cpu()])

    def _to_unit(self, action: Tensor) -> Tensor:
        """Invert `scale`, clipped to [-1, 1]."""
        if self.actions.discrete:
            return action
        return ((action - self.low) * (2 / (self.high - self.low)) - 1).clamp(-1, 1)


def _with_executed(state: Any, prev_action: Tensor) -> Any:
    """Replace the previous action in a memory by the executed one."""
    if isinstance(state, dict) and "action" in state:
        return {**state, "action": prev_action.to(state["action"])}
    return state
