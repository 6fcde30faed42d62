"""One policy's episode, stepped on request, and its unperturbed twin."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.timeout import env_call
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.perturbations.actions import in_range
from marl_pool.play.live import LivePerturbation
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Policy, State
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens


class LiveEpisode:
    """One episode of one policy, stepped on request.

    Args:
        target: policies and environments.
        env: one environment, reset here.
        perturbation: None for the twin.
        explore: sample actions.
    """

    def __init__(
        self,
        target: EvaluationTarget,
        env: BatchedEnv,
        perturbation: LivePerturbation | None,
        *,
        explore: bool,
    ) -> None:
        self.env, self.perturbation = env, perturbation
        self.rollout = Rollout(
            env, target.policies, perturbation=perturbation, explore=explore
        )
        self.transitions: Iterator[Transition] = self.rollout.transitions()
        self.returns = {
            name: torch.zeros(group.num_agents, dtype=torch.float64)
            for name, group in env.groups.items()
        }
        self.steps, self.over = 0, ""
        # By group, the latest actions that the policy chose, ``(agents, …)``, and the
        # same actions as the environment took them, within their range.
        self.actions: dict[str, Tensor] = {}
        self.executed: dict[str, Tensor] = {}

    def step(self) -> None:
        """Take a step, unless the episode is over."""
        if self.over:
            return
        transition = next(self.transitions)
        self.steps += 1
        for name, rewards in transition.step.rewards.items():
            self.returns[name] += rewards[0]
            decided = transition.decisions[name].action[0]
            chosen = self.rollout.policies[name].scale(decided)
            state = self.rollout.perturbation_states.get(name, {})
            executed = state["executed"][0] if "executed" in state else chosen
            spec = ActionSpec.of(self.env.groups[name].action_space)
            self.actions[name] = self._received(chosen)
            self.executed[name] = self._received(in_range(executed, spec))
        if transition.step.terminated[0]:
            self.over = "terminated"
        elif transition.step.truncated[0]:
            self.over = "time is up"

    def _received(self, actions: Tensor) -> Tensor:
        """Return actions in the environment's dtype.

        In float64 the last bits depend on the order of the tokens.
        """
        return actions.to(self.env.dtype) if actions.is_floating_point() else actions

    def chosen(self, group: str) -> Tensor:
        """Return the latest actions as the environment would clip them."""
        spec = ActionSpec.of(self.env.groups[group].action_space)
        return in_range(self.actions[group], spec)

    def perceived(self) -> dict[str, Tokens]:
        """Return what the policies see now, and act on in the next step."""
        # The rollout has perturbed the first observation already.
        return self.rollout.tokens if self.steps == 0 else self._perturbed()

    def observe(self) -> dict[str, Tokens]:
        """Return what there is to see now, unperturbed."""
        with env_call(self.env, "an observation"):
            return self.env.observe()

    def _perturbed(self) -> dict[str, Tokens]:
        observed, states = self.observe(), self.rollout.perturbation_states
        if self.perturbation is None:
            return observed
        return {
            name: self.perturbation(tokens, states[name])[0]
            for name, tokens in observed.items()
        }

    def attention(self, tokens: Tokens, group: str) -> Tensor | None:
        """Return the weights ``(agents, N)`` of perceived tokens, mean over heads."""
        policy, state = self.rollout.policies[group], self.rollout.states[group]
        with torch.no_grad():
            weights = policy.attention_weights(tokens, state)
        return None if weights is None else weights[0].mean(1)

    def refit(self) -> None:
        """Prepare for a perturbation that has changed.

        The observation of an episode's first step is perturbed again, and recurrent
        policies get memory for tokens that were added.
        """
        if self.steps == 0:
            self.rollout.tokens = self._perturbed()
        states, policies = self.rollout.states, self.rollout.policies
        for name, seen in self.perceived().items():
            states[name] = resized(policies[name], states[name], seen)

    def check(self) -> None:
        """Let the policies decide once, which raises where they cannot."""
        self.refit()
        for group, tokens in self.perceived().items():
            with torch.no_grad():
                self.rollout.policies[group].act(tokens, self.rollout.states[group])


@dataclass
class Lane:
    """A policy's episode under the hand, and its twin without perturbation."""

    name: str
    target: EvaluationTarget
    live: LivePerturbation
    """Perturbation of the episode."""
    episode: LiveEpisode
    twin: LiveEpisode
    parted: int | None = None
    """The step in which their actions first differed, as chosen or as executed."""

    def step(self) -> None:
        """Step both, and compare their actions."""
        self.episode.step()
        self.twin.step()
        episode, twin = (
            [*each.actions.values(), *each.executed.values()]
            for each in (self.episode, self.twin)
        )
        if self.parted is None and not all(map(torch.equal, episode, twin)):
            self.parted = self.episode.steps


def resized(policy: Policy, state: State, tokens: Tokens) -> State:
    """Fit a recurrent state to the number of tokens; added ones start anew."""
    if not state:
        return state
    num_envs, num_agents = tokens.batch_shape
    fresh = policy.initial_state(num_envs, num_agents, tokens.num_tokens)

    def fit(new: Tensor, old: Tensor) -> Tensor:
        if new.shape == old.shape:
            return old
        # The dimension of the tokens is the one that differs.
        result = new.to(old.dtype).clone()
        kept = tuple(
            slice(min(a, b)) for a, b in zip(new.shape, old.shape, strict=True)
        )
        result[kept] = old[kept]
        return result

    return tree_map(fit, fresh, state)
