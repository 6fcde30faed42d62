"""One policy's episode, stepped on request, and its unperturbed twin."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.play.live import LivePerturbation
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
        self.actions: dict[str, Tensor] = {}

    def step(self) -> None:
        """Take a step, unless the episode is over."""
        if self.over:
            return
        transition = next(self.transitions)
        self.steps += 1
        for name, rewards in transition.step.rewards.items():
            self.returns[name] += rewards[0]
            # In the environment's dtype, as it receives it: in float64 the last bits
            # depend on the order of the tokens.
            decided = transition.decisions[name].action[0]
            action = self.rollout.policies[name].scale(decided)
            is_real = action.is_floating_point()
            self.actions[name] = action.to(self.env.dtype) if is_real else action
        if transition.step.terminated[0]:
            self.over = "terminated"
        elif transition.step.truncated[0]:
            self.over = "time is up"

    def perceived(self) -> dict[str, Tokens]:
        """Return what the policies see now, and act on in the next step."""
        # The rollout has perturbed the first observation already.
        return self.rollout.tokens if self.steps == 0 else self._perturbed()

    def _perturbed(self) -> dict[str, Tokens]:
        observed, states = self.env.observe(), self.rollout.perturbation_states
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
    episode: LiveEpisode
    twin: LiveEpisode
    parted: int | None = None
    """The step in which their actions first differed."""

    @property
    def live(self) -> LivePerturbation:
        """The perturbation of the episode."""
        assert self.episode.perturbation is not None
        return self.episode.perturbation

    def step(self) -> None:
        """Step both, and compare their actions."""
        self.episode.step()
        self.twin.step()
        pairs = zip(
            self.episode.actions.values(), self.twin.actions.values(), strict=True
        )
        if self.parted is None and not all(a.equal(b) for a, b in pairs):
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
