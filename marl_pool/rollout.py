"""The one loop: observe → perturb → act → step.

PPO's runner, evaluation and rendering are short callers of it.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.envs.base import BatchedEnv, Step
from marl_pool.perturbations.base import Perturbation, PerturbationState
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream, stream_keys


class Transition(NamedTuple):
    """One step of the loop, by group where there are several agents."""

    env: BatchedEnv
    """After the step."""
    tokens: dict[str, Tokens]
    """What the policies saw."""
    states: dict[str, State]
    """What they remembered then."""
    decisions: dict[str, Decision]
    step: Step


class FinalObservation(NamedTuple):
    """What was seen last in some worlds: at an episode's or the fragment's end."""

    time: int
    rows: Tensor
    tokens: dict[str, Tokens]
    states: dict[str, State]


@dataclass(frozen=True)
class Trajectory:
    """Steps of one group; leading dimensions ``(T, num_envs, agents)``.

    Attributes:
        tokens: what the policy saw.
        actions: in the policy's own units.
        log_probs: of the actions.
        logits: of the action distributions.
        values: estimated returns of the observations.
        next_values: of the observations that followed, an episode's final one and
            the fragment's last one included; after a termination they mean nothing.
        rewards: of the steps.
        terminated: ``(T, num_envs)`` the world ended by itself.
        truncated: ``(T, num_envs)`` the world ran out of time.
        active: bool, the agent lived when it acted.
        next_active: bool, it lived after the step.
        states: what the policy remembered when it acted, a pytree, or ().
    """

    tokens: Tokens
    actions: Tensor
    log_probs: Tensor
    logits: Tensor
    values: Tensor
    next_values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    active: Tensor
    next_active: Tensor
    states: State = ()


class Episodes(NamedTuple):
    """Finished episodes."""

    returns: dict[str, Tensor]
    """For each group ``(episodes, agents)``, undiscounted."""
    lengths: Tensor
    """``(episodes,)`` int64."""


class Rollout:
    """Policies in a world, and where they stand.

    Args:
        world: reset here; the rollout owns it from now on.
        policies: for each group of the world.
        perturbation: between the world and the policies.
        explore: sample actions; otherwise take the most likely.
        played: episodes that each world has behind it, by which the severity of a
            perturbation with a ramp has grown.

    Raises:
        InputError: a group without a policy, or a policy without a group.
    """

    def __init__(
        self,
        env: BatchedEnv,
        policies: Mapping[str, Policy],
        *,
        perturbation: Perturbation | None = None,
        explore: bool = False,
        played: int = 0,
    ) -> None:
        if set(policies) != set(env.groups):
            raise InputError(
                f"policies: expected one for each group {sorted(env.groups)}, "
                f"got {sorted(policies)}"
            )
        self.env = env
        self.policies = {name: policies[name] for name in env.groups}
        self.perturbation, self.explore = perturbation, explore
        self.noise = {
            name: Stream(
                env.seed,
                env.env_ids,
                Purpose.POLICY,
                group.num_agents * self.policies[name].noise_size,
                part=part,
            )
            for part, (name, group) in enumerate(env.groups.items())
        }
        self.states: dict[str, State] = {}
        self.perturbed: dict[str, PerturbationState] = {}
        self.tokens: dict[str, Tokens] = {}
        self._finished: list[Episodes] = []
        self._played = torch.full_like(env.env_ids, played)
        env.reset()
        self._begin(None)

    @torch.no_grad()
    def steps(self, count: int) -> dict[str, Trajectory]:
        """Take ``count`` steps in every world; an ended world begins anew.

        Returns:
            For each group, its steps. They cut no episode: the next call goes on.

        Raises:
            InputError: ``count`` is below 1.
        """
        if count < 1:
            raise InputError(f"steps: expected at least 1, got {count}")
        transitions, active, next_active = [], [], []
        finals: list[FinalObservation] = []
        for t in range(count):
            active.append(self.env.active)
            transition = self._step()
            transitions.append(transition)
            next_active.append(self.env.active)
            ended = transition.step.terminated | transition.step.truncated
            if ended.any():
                self._look()
                rows = ended.nonzero()[:, 0]
                finals.append(FinalObservation(t, rows, *self._seen(rows)))
                self._finish(ended)
                self.env.reset(ended)
                self._begin(ended)
            else:
                self._look()
        rows = torch.arange(self.env.num_envs, device=self.env.device)
        finals.append(FinalObservation(count - 1, rows, *self._seen(rows)))
        return {
            name: self._trajectory(name, transitions, active, next_active, finals)
            for name in self.policies
        }

    @torch.no_grad()
    def episodes(
        self,
        on_step: Callable[[Transition], None] | None = None,
        *,
        idle: float = 0.0,
    ) -> Episodes:
        """Play one episode in every world; an ended world is dropped.

        One episode a world is unbiased; the first n that finish would favour short
        ones. The rollout has no worlds left afterwards.

        Args:
            on_step: called after each step with the worlds that were not yet dropped.
            idle: share of worlds that may have ended before they are dropped, all at
                once, which saves time where a step is cheap. Above 0 only for a world
                that can be stepped beyond its end (`BatchedEnv.steps_past_end`).

        Returns:
            The episodes in the order of the worlds.

        Raises:
            InputError: ``idle`` above 0 in a world that does not run on.
        """
        transitions = self.transitions(idle=idle)
        while True:
            try:
                transition = next(transitions)
            except StopIteration as end:
                episodes: Episodes = end.value
                return episodes
            if on_step is not None:
                on_step(transition)

    @torch.no_grad()
    def transitions(
        self, *, idle: float = 0.0
    ) -> Generator[Transition, None, Episodes]:
        """Do the same as `episodes`, a step whenever the next moment is asked for.

        So several rollouts can be played side by side.
        """
        if idle and not self.env.steps_past_end:
            raise InputError(
                f"idle: expected 0 for {type(self.env).__name__}, which does not say "
                f"that it steps_past_end beyond its end, got {idle}"
            )
        worlds = torch.arange(self.env.num_envs, device=self.env.device)
        over = torch.zeros_like(worlds, dtype=torch.bool)
        order, parts = [], []
        while len(worlds):
            transition = self._step()
            yield transition
            ended = (transition.step.terminated | transition.step.truncated) & ~over
            if ended.any():
                self._finish(ended)
                order.append(worlds[ended])
                parts.append(self._finished.pop())
                over |= ended
                if over.sum() > idle * len(over) or over.all():
                    worlds = worlds[~over]
                    self._keep((~over).nonzero()[:, 0])
                    over = over[~over]
            if len(worlds):
                self._look()
        back = torch.cat(order).argsort()
        returns = {
            name: torch.cat([part.returns[name] for part in parts])[back]
            for name in self.policies
        }
        return Episodes(returns, torch.cat([part.lengths for part in parts])[back])

    @torch.no_grad()
    def advance(self, count: int) -> dict[str, Tensor]:
        """Like `steps`, but record no trajectory and return only summed rewards.

        Args:
            count: of the steps.

        Returns:
            For each group the sum of its rewards, ``(num_envs, agents)`` float64.
        """
        totals = {name: torch.zeros_like(sums) for name, sums in self._returns.items()}
        for _ in range(count):
            step = self._step().step
            for name, rewards in step.rewards.items():
                totals[name] = totals[name] + rewards
            self._look()
            ended = step.terminated | step.truncated
            if ended.any():
                self._finish(ended)
                self._finished.clear()
                self.env.reset(ended)
                self._begin(ended)
        return totals

    def pop_finished(self) -> list[Episodes]:
        """Return the episodes that ended in `steps` since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue exactly."""
        return {
            "world": self.env.state_dict(),
            "noise": {name: noise.state_dict() for name, noise in self.noise.items()},
            "states": dict(self.states),
            "perturbed": dict(self.perturbed),
            "tokens": {name: tuple(tokens) for name, tokens in self.tokens.items()},
            "returns": dict(self._returns),
            "lengths": self._lengths,
            "played": self._played,
            "finished": [tuple(part) for part in self._finished],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken from a rollout built alike."""
        self.env.load_state_dict(state["world"])
        for name, noise in self.noise.items():
            noise.load_state_dict(state["noise"][name])
        # Dictionaries of its own, since a step replaces their entries.
        self.states, self.perturbed = dict(state["states"]), dict(state["perturbed"])
        self.tokens = {name: Tokens(*parts) for name, parts in state["tokens"].items()}
        self._returns, self._lengths = dict(state["returns"]), state["lengths"]
        # Checkpoints from before there were ramps do not say.
        self._played = state.get("played", self._played)
        self._finished = [Episodes(*parts) for parts in state["finished"]]

    def _step(self) -> Transition:
        decisions = {
            name: policy.act(
                self.tokens[name],
                self.states[name],
                self.noise[name] if policy.noise_size else None,
                self.explore,
            )
            for name, policy in self.policies.items()
        }
        before = self.env.active if any(self.states.values()) else {}
        step = self.env.step(
            {
                name: self.policies[name].scale(decision.action)
                for name, decision in decisions.items()
            }
        )
        transition = Transition(self.env, self.tokens, self.states, decisions, step)
        self.states = {name: decision.state for name, decision in decisions.items()}
        if before:
            self._forget_newborn(before)
        for name, rewards in step.rewards.items():
            self._returns[name] = self._returns[name] + rewards
        self._lengths = self._lengths + 1
        return transition

    def _forget_newborn(self, before: dict[str, Tensor]) -> None:
        """Give agents that came to life in mid-episode a memory of their own."""
        for name, living in self.env.active.items():
            born = living & ~before[name]
            if self.states[name] and born.any():
                start = self._initial_state(name)
                self.states[name] = _where(born, start, self.states[name])

    def _initial_state(self, name: str) -> State:
        group = self.env.groups[name]
        # A perturbation may have added tokens to what the group's spec says.
        return self.policies[name].initial_state(
            self.env.num_envs, group.num_agents, self.tokens[name].num_tokens
        )

    def _look(self) -> None:
        """Observe, through the perturbation."""
        tokens = self.env.observe()
        if self.perturbation is not None:
            for name in tokens:
                tokens[name], self.perturbed[name] = self.perturbation(
                    tokens[name], self.perturbed[name]
                )
        self.tokens = tokens

    def _begin(self, where: Tensor | None) -> None:
        """Start the worlds ``where`` anew: memories, noise, running sums."""
        env, tokens = self.env, self.env.observe()
        fresh: dict[str, Tokens] = {}
        for part, name in enumerate(env.groups):
            self.noise[name].restart(env.episodes, where)
            fresh[name] = tokens[name]
            if self.perturbation is not None:
                keys = stream_keys(
                    env.seed, env.env_ids, env.episodes, Purpose.PERTURBATION, part
                )
                ramp = self.perturbation.ramp is not None
                self.perturbed[name] = self.perturbation.start(
                    tokens[name],
                    keys,
                    self.perturbed.get(name),
                    where,
                    **({"episodes": self._played} if ramp else {}),
                )
        self._zero(where)
        self._show(where, fresh)
        for name in env.groups:
            start = self._initial_state(name)
            self.states[name] = _where(where, start, self.states.get(name, start))

    def _show(self, where: Tensor | None, fresh: dict[str, Tokens]) -> None:
        # A running world was already looked at in this step: its tokens stay.
        for name, tokens in fresh.items():
            if self.perturbation is not None:
                tokens, state = self.perturbation(tokens, self.perturbed[name])
                self.perturbed[name] = _where(where, state, self.perturbed[name])
            if where is not None and name in self.tokens:
                tokens = Tokens(*_where(where, tuple(tokens), tuple(self.tokens[name])))
            self.tokens = {**self.tokens, name: tokens}

    def _zero(self, where: Tensor | None) -> None:
        env = self.env
        if where is None:
            self._lengths = torch.zeros_like(env.steps)
            self._returns = {
                name: torch.zeros(
                    env.num_envs,
                    group.num_agents,
                    dtype=torch.float64,
                    device=env.device,
                )
                for name, group in env.groups.items()
            }
            return
        self._lengths = self._lengths.masked_fill(where, 0)
        self._returns = {
            name: returns.masked_fill(where[:, None], 0.0)
            for name, returns in self._returns.items()
        }

    def _finish(self, ended: Tensor) -> None:
        self._played = self._played + ended
        returns = {name: total[ended] for name, total in self._returns.items()}
        self._finished.append(Episodes(returns, self._lengths[ended]))

    def _keep(self, rows: Tensor) -> None:
        self.env = self.env.select(rows)
        self.noise = {name: noise.select(rows) for name, noise in self.noise.items()}
        self.states = _take(self.states, rows)
        self.perturbed = _take(self.perturbed, rows)
        self._returns = _take(self._returns, rows)
        self._lengths, self._played = self._lengths[rows], self._played[rows]

    def _seen(self, rows: Tensor) -> tuple[dict[str, Tokens], dict[str, State]]:
        """What the policies of the worlds ``rows`` see now, and their memories."""
        tokens = {name: tokens.at(rows) for name, tokens in self.tokens.items()}
        return tokens, _take(self.states, rows)

    def _next_values(
        self, name: str, values: Tensor, finals: list[FinalObservation]
    ) -> Tensor:
        # All final observations together in one pass: one by one, worlds that end at
        # different times would cost a second pass a step.
        tokens = _concatenate([tuple(final.tokens[name]) for final in finals])
        states = _concatenate([final.states[name] for final in finals])
        final_values = self.policies[name].value(Tokens(*tokens), states)
        next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
        *ends, last = final_values.split([len(final.rows) for final in finals])
        next_values[-1] = last
        for final, value in zip(finals, ends, strict=False):
            next_values[final.time, final.rows] = value
        return next_values

    def _trajectory(
        self,
        name: str,
        transitions: list[Transition],
        active: list[dict[str, Tensor]],
        next_active: list[dict[str, Tensor]],
        finals: list[FinalObservation],
    ) -> Trajectory:
        decisions = [transition.decisions[name] for transition in transitions]
        values = torch.stack([decision.value for decision in decisions])
        tokens = [transition.tokens[name] for transition in transitions]
        steps = [transition.step for transition in transitions]
        return Trajectory(
            tokens=Tokens(*(torch.stack(parts) for parts in zip(*tokens, strict=True))),
            actions=torch.stack([decision.action for decision in decisions]),
            log_probs=torch.stack([decision.log_prob for decision in decisions]),
            logits=torch.stack([decision.logits for decision in decisions]),
            values=values,
            next_values=self._next_values(name, values, finals),
            rewards=torch.stack([step.rewards[name] for step in steps]),
            terminated=torch.stack([step.terminated for step in steps]),
            truncated=torch.stack([step.truncated for step in steps]),
            active=torch.stack([living[name] for living in active]),
            next_active=torch.stack([living[name] for living in next_active]),
            states=_stack([transition.states[name] for transition in transitions]),
        )


def collect(
    env: BatchedEnv,
    policies: Mapping[str, Policy],
    *,
    steps: int,
    perturbation: Perturbation | None = None,
    explore: bool = False,
) -> dict[str, Trajectory]:
    """Reset ``world``, take ``steps`` steps and return each group's trajectory.

    For several calls that go on where the last ended, keep a `Rollout`.
    """
    rollout = Rollout(env, policies, perturbation=perturbation, explore=explore)
    return rollout.steps(steps)


def _where(where: Tensor | None, new: Any, old: Any) -> Any:
    """Choose rows of pytrees of tensors: ``new`` where True, ``old`` elsewhere."""
    if where is None:
        return new

    def choose(fresh: Tensor, present: Tensor) -> Tensor:
        rows = where.view(*where.shape, *[1] * (fresh.dim() - where.dim()))
        return torch.where(rows, fresh, present)

    return tree_map(choose, new, old)


def _take(tree: Any, rows: Tensor) -> Any:
    """Index the leading dimension of every tensor of a pytree."""
    return tree_map(lambda tensor: tensor[rows], tree)


def _concatenate(trees: list[Any]) -> Any:
    """Concatenate pytrees of tensors along the leading dimension."""
    return tree_map(lambda *parts: torch.cat(parts), *trees)


def _stack(trees: list[Any]) -> Any:
    """Stack pytrees of tensors along a new leading dimension."""
    return tree_map(lambda *parts: torch.stack(parts), *trees)
