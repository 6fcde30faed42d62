"""The loop observe → perturb → act → step of training, evaluation and rendering."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from marl_pool.compiled import CompiledTokenPolicy, compile
from marl_pool.compiled.graph import MOST_STEPS, Capture, StepGraph, capture_on
from marl_pool.critics.base import Critic
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.contract import (
    Presence,
    checked_observation,
    checked_state,
    checked_state_specs,
    checked_step,
    presence_of,
    validate_presence,
    validate_state_names,
    validate_types,
)
from marl_pool.envs.timeout import env_call
from marl_pool.finite import validate_finite
from marl_pool.perturbations.base import Perturbation, PerturbationState
from marl_pool.perturbations.turns import Change, EveryStep, OwnTurns, validate_fits
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.policies.masks import validate_masks
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import Tokens
from marl_pool.trajectory import (
    Ending,
    Episodes,
    FinalObservation,
    Fragment,
    Trajectory,
    Transition,
    choose_rows,
    concatenate_rows,
    index_rows,
    stack_steps,
)
from marl_pool.utils.devices import without_reads
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream, stream_keys

DRAW_SHIFT = 16
"""Bits of the group's number in the key of a perturbation's random stream."""


class Rollout:
    """Policies acting in a batch of environments.

    Each step

    1. *observes* the environments and *perturbs* the observations,
    2. lets the policies *act* on them,
    3. *steps* all environments, and
    4. *ends* episodes that are over: `steps` and `advance` reset these environments at
       once, `episodes` drops them.

    All random numbers come from streams keyed by (seed, environment, episode), so that
    a trajectory does not depend on the size of the batch.

    On a GPU `steps` and `advance` read no values until the fragment is over, because
    each read would wait for the device: see `marl_pool.utils.devices.may_read`. Every
    step then resets all environments and keeps the result where an episode ended.

    Example:
        ::

            rollout = Rollout(env, {"agent": policy}, explore=True)
            trajectory = rollout.steps(128)["agent"]
            returns = Rollout(env, {"agent": policy}).episodes().returns["agent"]

    Args:
        env: environments, reset here and owned by the rollout from now on.
        policies: a policy for each group of agents, compiled here: see
            `marl_pool.compile`.
        perturbation: perturbation of observations and actions, if any.
        explore: sample actions; otherwise take the mode of their distribution.
        played: episodes that each environment has played already; a perturbation with
            a ramp continues from there.
        draw: number of the perturbation's sample; each has separate random numbers, in
            the same episodes.
        sync_free: step without reading values; the trajectories are the same. By
            default only if the environments are on a GPU.
        critics: by group, the critic that estimates the values of `steps` in place of
            the policy.

    Attributes:
        tokens: for each group, the current observation, perturbed.
        states: for each group, the state of its policy.
        perturbation_states: for each group, the state of the perturbation or, in
            turn-based environments, of `OwnTurns`; see `perturbation_state`.
        sync_free: True if `steps` and `advance` read no values in between. Simulators
            run on the host, so it is False for them.
        uses_graph: True if `steps` launches its steps as CUDA graphs.

    Raises:
        InputError: a group without a policy, or a policy without a group; a
            perturbation of agents or steps that the environment lacks.
    """

    def __init__(
        self,
        env: BatchedEnv,
        policies: Mapping[str, Policy],
        *,
        perturbation: Perturbation | None = None,
        explore: bool = False,
        played: int = 0,
        draw: int = 0,
        sync_free: bool | None = None,
        critics: Mapping[str, Critic] | None = None,
    ) -> None:
        if set(policies) != set(env.groups):
            raise InputError(
                f"policies: expected one for each group {sorted(env.groups)}, "
                f"got {sorted(policies)}"
            )
        # Keep the groups in the order of the environment, which numbers their streams.
        self.env = env
        self.policies = {name: compile(policies[name]) for name in env.groups}
        self._actors = self.policies
        self.critics = dict(critics or {})
        reads_state = any(critic.reads == "state" for critic in self.critics.values())
        self._state_specs = checked_state_specs(env) if reads_state else None
        self.perturbation, self.explore, self.draw = perturbation, explore, draw
        if perturbation is not None:
            validate_fits(perturbation, env)
        self._perturbations = self._perturbation_by_group()
        if sync_free is None:
            sync_free = env.device.type != "cpu"
        self.sync_free = sync_free and not env.simulated
        # Give each group a separate random stream.
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
        # The states of policies and perturbations, and the current observations.
        self.states: dict[str, State] = {}
        self.perturbation_states: dict[str, PerturbationState] = {}
        self.tokens: dict[str, Tokens] = {}
        # Lengths and returns of the running episodes, and the finished ones.
        self._lengths = torch.zeros_like(env.steps)
        self._returns = {
            name: torch.zeros(
                (env.num_envs, group.num_agents), dtype=torch.float64, device=env.device
            )
            for name, group in env.groups.items()
        }
        # Agents that have lived in the running episodes.
        self._attended = {
            name: torch.full_like(returns, not env.may_be_absent, dtype=torch.bool)
            for name, returns in self._returns.items()
        }
        self._finished: list[Episodes] = []
        self._played = torch.full_like(env.env_ids, played)
        # On a GPU steps are captured in a graph, one for each fragment length.
        self.uses_graph = self.sync_free and env.device.type == "cuda"
        self._graphs: dict[int, StepGraph | None] = {}
        self._places: tuple[int, ...] = ()
        self._capture_by: Capture = partial(capture_on, env.device)
        with env_call(env, "a reset"):
            env.reset()
        validate_state_names(env)
        self._start_episodes(None)

    @torch.no_grad()
    def steps(self, count: int) -> dict[str, Trajectory]:
        """Take ``count`` steps in every environment, and reset those that ended.

        An episode may span several calls: each continues where the last one stopped.

        Returns:
            The steps of each group.

        Raises:
            InputError: ``count`` is below 1, `episodes` has left no environment, an
                action mask allows nothing, or the environment breaks its contract.
            NonFiniteError: an observation, logit or reward is NaN or infinite.
        """
        _validate_count(count)
        self._validate_not_over()
        first_steps = self._lengths.clone()
        with without_reads() if self.sync_free else nullcontext():
            fragment, endings = self._play(count)
            finals, episodes = _collect(endings)
            self._finished += episodes
            # The fragment ends here for every environment, in mid-episode or not.
            rows = torch.arange(self.env.num_envs, device=self.env.device)
            last = FinalObservation(
                count - 1, rows, self.tokens, self._critic_tokens(), self.states
            )
            trajectories = {
                name: self._join(name, [step[name] for step in fragment], finals, last)
                for name in self.policies
            }
        # The checks read values, so they come after the whole fragment.
        played = trajectories.items()
        active = {name: part.active for name, part in played}
        alive = {
            name: active[name] if part.alive is None else part.alive
            for name, part in played
        }
        rewards = {name: part.rewards for name, part in played}
        numbers = _step_numbers(first_steps, next(iter(trajectories.values())))
        presence = Presence(alive, active)
        validate_presence(self.env, presence, rewards, first_steps=numbers)
        for name, trajectory in trajectories.items():
            self._validate_types(name, trajectory.tokens, numbers)
            if self.sync_free and trajectory.tokens.action_mask is not None:
                for t, steps in enumerate(numbers):
                    tokens, acting = trajectory.tokens.at(t), active[name][t]
                    self._validate_masks({name: tokens}, {name: acting}, steps)
            validate_finite(
                name,
                trajectory.tokens,
                trajectory.logits,
                trajectory.rewards,
                states=trajectory.critic_tokens,
                env_ids=self.env.env_ids,
                first_steps=numbers,
            )
        return trajectories

    def _play(self, count: int) -> Fragment:
        """Take ``count`` steps."""
        if self.uses_graph:
            # Keep earlier finished episodes out of the state that a graph captures.
            finished, self._finished = self._finished, []
            try:
                return self._replay(count)
            finally:
                self._finished = finished
        return self._play_eagerly(count)

    def _replay(self, count: int) -> Fragment:
        """Take ``count`` steps by a graph, which the first call captures."""
        # A divisor of `count`, so that one graph serves the whole fragment.
        length = math.gcd(count, MOST_STEPS)
        # A graph reads the weights from where they were when it was captured.
        tensors = [t for policy in self.policies.values() for t in policy.parameters()]
        places = tuple(map(Tensor.data_ptr, tensors))
        if places != self._places:
            self._graphs, self._places = {}, places
        graph = self._graphs.get(length)
        if graph is None:
            # The first call compiles and caches what a graph cannot.
            fragment = self._play_eagerly(count)
            self._graphs[length] = self._capture(length)
            return fragment
        steps: list[dict[str, Trajectory]] = []
        endings: list[Ending] = []
        for start in range(0, count, length):
            before = self.state_dict()
            try:
                (played, ends), state = graph.run(before)
            except RuntimeError as error:
                # The graph cannot continue from this state.
                self._give_up_graphs(error)
                self.load_state_dict(before)
                eager_steps, last = self._play_eagerly(count - start)
                last = [end._replace(time=start + end.time) for end in last]
                return steps + eager_steps, endings + last
            self.load_state_dict(state)
            steps += played
            endings += [end._replace(time=start + end.time) for end in ends]
        return steps, endings

    def _give_up_graphs(self, error: RuntimeError) -> None:
        warnings.warn(f"the steps run without a CUDA graph: {error}", stacklevel=3)
        self.uses_graph, self._graphs = False, {}

    def _capture(self, length: int) -> StepGraph | None:
        """Capture steps; if that fails, return None and give up on graphs."""

        def play() -> tuple[Any, Any]:
            return self._play_eagerly(length), self.state_dict()

        before = self.state_dict()
        try:
            return StepGraph(self._capture_by, self.load_state_dict, play, before)
        except RuntimeError as error:
            self._give_up_graphs(error)
            return None
        finally:
            self.load_state_dict(before)

    def _play_eagerly(self, count: int) -> Fragment:
        self._fix_actors()
        fragment: list[dict[str, Trajectory]] = []
        endings: list[Ending] = []
        presence = presence_of(self.env)
        for t in range(count):
            # Act on the current observations, and step all environments.
            if self.env.may_be_absent:
                presence = presence_of(self.env)
            state_tokens = self._state_tokens()
            transition = self._step(reads=not self.sync_free)
            fragment.append(self._record(transition, presence, state_tokens))
            # Observe before any reset: values of final observations are needed too.
            self._observe()
            ended = transition.step.terminated | transition.step.truncated
            if self.sync_free or ended.any():
                # Copy the dictionaries, whose entries the reset replaces.
                observed = self.tokens, self._critic_tokens(), dict(self.states)
                endings.append(Ending(t, ended, *observed, *self._totals()))
                self._restart(ended)
        return fragment, endings

    @torch.no_grad()
    def advance(self, count: int) -> dict[str, Tensor]:
        """Take steps as `steps` does, but return only the summed rewards.

        Returns:
            For each group ``(num_envs, agents)`` float64.

        Raises:
            InputError: as in `steps`; with ``sync_free`` only after the last step.
            NonFiniteError: as in `steps`.
        """
        _validate_count(count)
        self._validate_not_over()
        self._fix_actors()
        unchecked: list[tuple[Transition, Presence | None, Tensor]] = []
        totals = {name: torch.zeros_like(sums) for name, sums in self._returns.items()}
        with without_reads() if self.sync_free else nullcontext():
            for _ in range(count):
                presence, lengths = self._presence(), self._lengths
                transition = self._step(reads=not self.sync_free)
                if self.sync_free:
                    unchecked.append((transition, presence, lengths))
                else:
                    self._validate_step(transition, presence, lengths)
                step = transition.step
                for name, rewards in step.rewards.items():
                    totals[name] = totals[name] + rewards
                self._observe()
                ended = step.terminated | step.truncated
                if self.sync_free or ended.any():
                    self._restart(ended)
        for transition, presence, lengths in unchecked:
            # Without absences the mask is the same in every step.
            active = self.env.active if presence is None else presence.active
            self._validate_masks(transition.tokens, active, lengths)
            self._validate_step(transition, presence, lengths)
        return totals

    @torch.no_grad()
    def episodes(
        self, on_step: Callable[[Transition], None] | None = None, *, idle: float = 0.0
    ) -> Episodes:
        """Play one episode in every environment; ended environments are dropped.

        One episode per environment is unbiased, whereas the first n episodes to finish
        would favor short ones. No environment is left in the rollout afterwards.

        Args:
            on_step: called after each step with the environments not yet dropped. It
                must not change the policies' weights.
            idle: largest fraction of finished environments, in [0, 1], that are still
                stepped; more are dropped, all at once, which saves time where a step is
                cheap. Above 0 only with `BatchedEnv.steps_past_end`.

        Returns:
            The episodes in the order of the environments.

        Raises:
            InputError: ``idle`` above 0 where finished environments cannot be stepped,
                no environment left by an earlier call, an action mask that allows
                nothing, or an environment that breaks its contract.
            NonFiniteError: an observation, logit or reward is NaN or infinite.
        """
        for transition in self.transitions(idle=idle):
            if on_step is not None:
                on_step(transition)
        return self._finished.pop()

    @torch.no_grad()
    def transitions(self, *, idle: float = 0.0) -> Iterator[Transition]:
        """Yield the transitions of `episodes`, to play several rollouts side by side.

        Afterwards `pop_finished` returns the episodes. Weights must not change until
        then.

        Raises:
            InputError: as in `episodes`.
            NonFiniteError: as in `episodes`.
        """
        if idle and not self.env.steps_past_end:
            raise InputError(
                f"idle: expected 0 for {type(self.env).__name__}, whose steps_past_end "
                f"is False, got {idle}"
            )
        self._validate_not_over()
        self._fix_actors()
        # Positions in the batch at the start of the environments not yet dropped.
        positions = torch.arange(self.env.num_envs, device=self.env.device)
        over = torch.zeros_like(positions, dtype=torch.bool)
        order, parts = [], []
        while len(positions):
            # Act and step.
            presence, lengths = self._presence(), self._lengths
            transition = self._step(reads=True, playing=~over)
            self._validate_step(transition, presence, lengths, ~over)
            yield transition
            # Record the first end in each environment; drop those that are over.
            ended = (transition.step.terminated | transition.step.truncated) & ~over
            if ended.any():
                self._played = self._played + ended
                order.append(positions[ended])
                parts.append(index_rows(self._totals(), ended))
                over |= ended
                if over.sum() > idle * len(over) or over.all():
                    positions = positions[~over]
                    self._select((~over).nonzero()[:, 0])
                    over = over[~over]
            if len(positions):
                self._observe()
        # Episodes were recorded as they ended; sort them by position.
        by_position = torch.cat(order).argsort()
        self._finished.append(index_rows(concatenate_rows(parts), by_position))

    def _validate_not_over(self) -> None:
        if not self.env.num_envs:
            raise InputError(
                "rollout: expected environments to step, got none, since `episodes` "
                "has played and dropped them all; make a new one"
            )

    def pop_finished(self) -> list[Episodes]:
        """Return the episodes that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue exactly."""
        return {
            "env": self.env.state_dict(),
            "noise": {name: noise.state_dict() for name, noise in self.noise.items()},
            "states": dict(self.states),
            "perturbation_states": dict(self.perturbation_states),
            "tokens": {name: tokens.parts for name, tokens in self.tokens.items()},
            "returns": dict(self._returns),
            "attended": dict(self._attended),
            "lengths": self._lengths,
            "played": self._played,
            "finished": [tuple(part) for part in self._finished],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a rollout with the same arguments."""
        self.env.load_state_dict(state["env"])
        for name, noise in self.noise.items():
            noise.load_state_dict(state["noise"][name])
        # Copy the dictionaries, since a step replaces their entries.
        self.states = dict(state["states"])
        self.perturbation_states = dict(state["perturbation_states"])
        self.tokens = {name: Tokens(*parts) for name, parts in state["tokens"].items()}
        self._returns, self._lengths = dict(state["returns"]), state["lengths"]
        self._attended, self._played = dict(state["attended"]), state["played"]
        self._finished = [Episodes(*parts) for parts in state["finished"]]

    def _step(self, *, reads: bool, playing: Tensor | None = None) -> Transition:
        """Act and step once; the caller then observes and ends episodes.

        Args:
            reads: values may be read.
            playing: ``(num_envs,)`` bool, environments that count; None for all.
        """
        if reads and any(t.action_mask is not None for t in self.tokens.values()):
            active = self.env.active
            if playing is not None:
                active = {n: mask & playing[:, None] for n, mask in active.items()}
            self._validate_masks(self.tokens, active, self._lengths)
        # Act: every policy decides from the perturbed tokens of its group.
        decisions = {name: self._decide(name) for name in self.policies}
        # Step: actions are scaled from the policy's units to the space's.
        has_memory = bool(tree_leaves(self.states))
        may_be_absent = self.env.may_be_absent
        alive = self.env.alive if has_memory or may_be_absent else {}
        if may_be_absent:
            for name, living in alive.items():
                self._attended[name] = self._attended[name] | living
        acting = self.env.active if has_memory and self.env.turn_based else {}
        actions = {
            name: self.policies[name].scale(decision.action)
            for name, decision in decisions.items()
        }
        # A perturbation may change what is executed; policies and trajectories keep
        # the actions that were chosen.
        executed, states = dict(actions), self.perturbation_states
        for name, perturbation in self._perturbations.items():
            space, tokens = self.env.groups[name].action_space, self.tokens[name]
            actions[name] = perturbation.select(actions[name], states[name], tokens)
            executed[name], states[name] = perturbation.disturb(
                actions[name], states[name], space
            )
        with env_call(self.env, "a step"):
            step = checked_step(self.env, executed)
        transition = Transition(
            self.env, self.tokens, self.states, decisions, step, actions, executed
        )
        # Carry the policies' states over, except to newborn agents; agents whose turn
        # it was not keep theirs.
        self.states = {name: decision.state for name, decision in decisions.items()}
        for name, where in acting.items():
            old = transition.states[name]
            self.states[name] = choose_rows(where, self.states[name], old)
        if has_memory:
            self._reset_states_of_newborn(alive, reads=reads)
        # Sum up rewards and steps of the running episodes.
        for name, rewards in step.rewards.items():
            self._returns[name] = self._returns[name] + rewards
        self._lengths = self._lengths + 1
        return transition

    def _totals(self) -> Episodes:
        """Return the totals of the running episodes so far."""
        return Episodes(dict(self._returns), self._lengths, dict(self._attended))

    def _state_tokens(self) -> dict[str, Tokens]:
        """Return the states that critics read, by group; none if no critic does."""
        if self._state_specs is None:
            return {}
        with env_call(self.env, "an observation of the state"):
            return checked_state(self.env, self._state_specs)

    def _critic_tokens(self) -> dict[str, Tokens]:
        """Return what the critics read now, by group."""
        tokens = {**self.tokens, **self._state_tokens()}
        return {name: tokens[name] for name in self.critics}

    def _fix_actors(self) -> None:
        """Let compiled policies look for their weights once for the coming steps."""
        self._actors = {
            name: policy.fixed() if isinstance(policy, CompiledTokenPolicy) else policy
            for name, policy in self.policies.items()
        }

    def _presence(self) -> Presence | None:
        return presence_of(self.env) if self.env.may_be_absent else None

    def _validate_step(
        self,
        transition: Transition,
        presence: Presence | None,
        lengths: Tensor,
        playing: Tensor | None = None,
    ) -> None:
        """Raise InputError if a step breaks the contract or has a non-finite number.

        Args:
            transition: the step.
            presence: agents that were alive and that acted; None if all always are.
            lengths: ``(num_envs,)`` steps of the episodes before this one.
            playing: ``(num_envs,)`` bool, environments to check; None for all.
        """
        env, rewards = self.env, transition.step.rewards
        validate_presence(env, presence, rewards, first_steps=lengths, playing=playing)
        for name, decision in transition.decisions.items():
            tokens = transition.tokens[name]
            self._validate_types(name, tokens, lengths, playing)
            validate_finite(
                name,
                # The check expects a time dimension.
                tokens.map(lambda part: part[None]),
                decision.logits[None],
                rewards[name][None],
                env_ids=env.env_ids,
                first_steps=lengths,
                playing=playing,
            )

    def _decide(self, name: str) -> Decision:
        """Let the policy of a group act; explain a failure by an unknown token type."""
        policy, tokens = self._actors[name], self.tokens[name]
        noise = self.noise[name] if policy.noise_size else None
        try:
            return policy.act(tokens, self.states[name], noise, self.explore)
        except (IndexError, InputError):
            self._validate_types(name, tokens, self._lengths)
            raise

    def _validate_types(
        self, name: str, tokens: Tokens, steps: Tensor, playing: Tensor | None = None
    ) -> None:
        """Raise InputError if a type is undeclared; see `validate_types`."""
        try:
            validate_types(self.env, name, tokens, steps, playing)
        except InputError as error:
            if name not in self._perturbations:
                raise
            # The environment is at fault if its present observation is.
            validate_types(self.env, name, self._observed()[name], self._lengths)
            perturbation = type(self.perturbation).__name__
            raise InputError(f"perturbation {perturbation!r} of {error}") from error

    def _validate_masks(
        self,
        tokens: Mapping[str, Tokens],
        active: Mapping[str, Tensor],
        steps: Tensor,
    ) -> None:
        """Raise InputError if an action mask leaves an agent that acts no option.

        Args:
            tokens: observations of each group, ``(num_envs, agents)``.
            active: agents of each group that act, ``(num_envs, agents)`` bool.
            steps: ``(num_envs,)`` steps of the episodes so far, for the message.
        """
        for name, observed in tokens.items():
            if observed.action_mask is not None:
                validate_masks(
                    name,
                    self.env.groups[name].actions,
                    observed.action_mask,
                    active[name],
                    num_tokens=observed.num_tokens,
                    env_ids=self.env.env_ids,
                    steps=steps,
                )

    def _observe(self) -> None:
        """Observe all environments, perturbed."""
        tokens = self._observed()
        for name, perturbation in self._perturbations.items():
            tokens[name], self.perturbation_states[name] = perturbation.perceive(
                tokens[name], self.perturbation_states[name]
            )
        self.tokens = tokens

    def _perturbation_by_group(self) -> dict[str, EveryStep]:
        """Return the perturbation of each group; it may cover only some of them."""
        if self.perturbation is None:
            return {}
        # A cycle of references would keep the tensors of old rollouts for a while.
        rollout = weakref.proxy(self)
        kind = OwnTurns if self.env.turn_based else EveryStep
        return {
            name: kind(
                self.perturbation.for_group(name),
                partial(Rollout._acting, rollout, name),
                partial(Rollout._perturbation_streams, rollout, name),
                SelectedTokens(group.tokens, group.actions)
                if group.actions.selects
                else None,
            )
            for name, group in self.env.groups.items()
            if self.perturbation.covers(name)
        }

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not refer to this rollout.
        state = self.__dict__.copy()
        del state["_perturbations"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._perturbations = self._perturbation_by_group()

    def _acting(self, name: str) -> Tensor:
        """Return a group's agents that act now, ``(num_envs, agents)`` bool."""
        return self.env.active[name]

    def _perturbation_streams(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the keys of a group's streams, and the episodes played so far."""
        # Draws after the first have numbers that no group has.
        env, part = self.env, [*self.env.groups].index(name)
        number = part + (self.draw << DRAW_SHIFT)
        keys = stream_keys(
            env.seed, env.env_ids, env.episodes, Purpose.PERTURBATION, number
        )
        return keys, self._played

    def perceived(self) -> dict[str, Tokens]:
        """Return what the policies would observe now, perturbed as in a step."""
        tokens = self._observed()
        for name, perturbation in self._perturbations.items():
            state = self.perturbation_states[name]
            tokens[name], _ = perturbation.perceive(tokens[name], state)
        return tokens

    def perturbation_state(self, name: str, agent: int) -> PerturbationState:
        """Return the state of the perturbation that applies to an agent of a group.

        It is a state of the whole group, as `Perturbation.perceive` takes it; in a
        turn-based environment only the agent's part of it counts. Empty without a
        perturbation.
        """
        if name not in self._perturbations:
            return {}
        state = self.perturbation_states[name]
        return self._perturbations[name].state_of(state, agent)

    def change_perturbation(self, name: str, change: Change) -> None:
        """Replace the state of a group's perturbation by a function of it.

        Args:
            name: the group.
            change: maps the unperturbed observation and the state to a new state.
        """
        self.perturbation_states[name] = self._perturbations[name].changed(
            self._observed()[name], self.perturbation_states[name], change
        )

    def _observed(self) -> dict[str, Tokens]:
        """Return the unperturbed observations."""
        with env_call(self.env, "an observation"):
            return checked_observation(self.env)

    def _restart(self, ended: Tensor) -> None:
        """Start new episodes where ``ended``, ``(num_envs,)`` bool."""
        self._played = self._played + ended
        self._lengths = self._lengths.masked_fill(ended, 0)
        self._returns = {
            name: total.masked_fill(ended[:, None], 0.0)
            for name, total in self._returns.items()
        }
        # Where nobody can be absent, all have attended from the start.
        if self.env.may_be_absent:
            self._attended = {
                name: attended & ~ended[:, None]
                for name, attended in self._attended.items()
            }
        with env_call(self.env, "a reset"):
            self.env.reset(ended)
        self._start_episodes(ended)

    def _start_episodes(self, where: Tensor | None) -> None:
        """Start episodes in the environments ``where`` (None: all), which were reset.

        The other environments are left untouched.
        """
        env, observed = self.env, self._observed()
        # Restart the random streams, and sample the perturbation of the new episodes.
        for name in env.groups:
            self.noise[name].restart(env.episodes, where)
        for name, perturbation in self._perturbations.items():
            self.perturbation_states[name] = perturbation.start(
                observed[name], self.perturbation_states.get(name), where
            )
        # Observe. Running environments keep their tokens: these were already perturbed
        # in this step, and must not be a second time.
        for name, tokens in observed.items():
            if name in self._perturbations:
                tokens, after = self._perturbations[name].perceive(
                    tokens, self.perturbation_states[name], where
                )
                self.perturbation_states[name] = after
            # Replace the dictionary, which may belong to the environment.
            tokens = choose_rows(where, tokens, self.tokens.get(name))
            self.tokens = {**self.tokens, name: tokens}
        # Reset the policies' states last: their size may depend on the tokens.
        for name in env.groups:
            start = self.policies[name].initial_state(*self._sizes(name))
            self.states[name] = choose_rows(where, start, self.states.get(name))

    def _reset_states_of_newborn(
        self, was_alive: Mapping[str, Tensor], *, reads: bool
    ) -> None:
        """Give agents that were born in mid-episode an initial state."""
        for name, alive in self.env.alive.items():
            newborn = alive & ~was_alive[name]
            # Without memory there is nothing to reset. `any` reads a value, which is
            # allowed only with `reads`.
            if tree_leaves(self.states[name]) and not (reads and not newborn.any()):
                start = self.policies[name].newborn_state(
                    self.states[name], *self._sizes(name)
                )
                self.states[name] = choose_rows(newborn, start, self.states[name])

    def _sizes(self, name: str) -> tuple[int, int, int]:
        """Return the arguments of `Policy.initial_state`."""
        # Count the perturbed tokens: a perturbation may have added some.
        num_agents = self.env.groups[name].num_agents
        return self.env.num_envs, num_agents, self.tokens[name].num_tokens

    def _select(self, rows: Tensor) -> None:
        """Keep only the environments ``rows``."""
        self.env = self.env.select(rows)
        self.noise = {name: noise.select(rows) for name, noise in self.noise.items()}
        self.states = index_rows(self.states, rows)
        self.perturbation_states = index_rows(self.perturbation_states, rows)
        self._returns = index_rows(self._returns, rows)
        self._attended = index_rows(self._attended, rows)
        self._lengths, self._played = self._lengths[rows], self._played[rows]

    def _record(
        self,
        transition: Transition,
        presence: Presence,
        state_tokens: Mapping[str, Tokens],
    ) -> dict[str, Trajectory]:
        """Return the step just taken, without next values, for each group."""
        step = transition.step
        # If no agent can be absent, the masks are still the same.
        following = presence_of(self.env) if self.env.may_be_absent else presence
        by_turns = self.env.turn_based
        return {
            name: Trajectory(
                tokens=transition.tokens[name],
                actions=decision.action,
                log_probs=decision.log_prob,
                logits=decision.logits,
                values=decision.value,
                next_values=decision.value,  # replaced by `_join`
                rewards=step.rewards[name],
                terminated=step.terminated,
                truncated=step.truncated,
                active=presence.active[name],
                next_active=following.active[name],
                states=transition.states[name],
                next_alive=following.alive[name] if by_turns else None,
                # Do not stack one mask twice.
                alive=None
                if presence.alive[name] is presence.active[name]
                else presence.alive[name],
                critic_tokens=state_tokens.get(name),
            )
            for name, decision in transition.decisions.items()
        }

    def _join(
        self,
        name: str,
        steps: list[Trajectory],
        finals: list[FinalObservation],
        last: FinalObservation,
    ) -> Trajectory:
        """Stack a group's steps, and add the values of the observations after them."""
        # Stack field by field: a tree_map over whole steps costs as much again.
        stacked = Trajectory(*map(stack_steps, zip(*steps, strict=True)))
        ends = [*finals, last]
        critic = self.critics.get(name)
        if critic is None:
            tokens = concatenate_rows([end.tokens[name] for end in ends])
            states = concatenate_rows([end.states[name] for end in ends])
            values = self.policies[name].value(tokens, states)
        else:
            # One pass for the whole fragment, since no action depends on a value.
            critic_tokens = stacked.critic_tokens
            if critic_tokens is None:
                critic_tokens = stacked.tokens
            values = critic(critic_tokens, stacked.active)
            stacked = stacked._replace(values=values)
            tokens = concatenate_rows([end.critic_tokens[name] for end in ends])
            remain = [stacked.next_active[end.time, end.rows] for end in ends]
            values = critic(tokens, torch.cat(remain))
        # Within an episode the next observation's value is the next step's.
        next_values = stacked.values.roll(-1, 0)
        # At the end of an episode or of the fragment it is the final observation's. All
        # final observations share one pass: environments that end at different times
        # would otherwise cost a second pass at almost every step.
        *final_values, next_values[-1] = values.split([len(end.rows) for end in ends])
        for final, value in zip(finals, final_values, strict=True):
            next_values[final.time, final.rows] = value
        return stacked._replace(next_values=next_values)


def collect(
    env: BatchedEnv,
    policies: Mapping[str, Policy],
    *,
    steps: int,
    perturbation: Perturbation | None = None,
    explore: bool = False,
) -> dict[str, Trajectory]:
    """Reset ``env``, take ``steps`` steps and return each group's trajectory.

    See `Rollout` for the arguments; keep one to continue with more steps afterwards.
    """
    rollout = Rollout(env, policies, perturbation=perturbation, explore=explore)
    return rollout.steps(steps)


def _validate_count(steps: int) -> None:
    if steps < 1:
        raise InputError(f"steps: expected at least 1, got {steps}")


def _step_numbers(first_steps: Tensor, steps: Trajectory) -> Tensor:
    """Return the numbers of a fragment's steps in their episodes, ``(T, num_envs)``.

    ``first_steps`` ``(num_envs,)`` are the numbers of its first steps.
    """
    ended = steps.terminated | steps.truncated
    times = torch.arange(len(ended), device=ended.device)[:, None]
    # The time at which the current episode began, negative if before the fragment.
    # The step after an end is the first of the next episode; `roll` moves it there.
    begins = torch.where(ended, times + 1, -first_steps).roll(1, 0)
    begins[0] = -first_steps
    # Episodes begin one after another, so the latest beginning is the largest.
    return times - begins.cummax(0).values


def _collect(endings: list[Ending]) -> tuple[list[FinalObservation], list[Episodes]]:
    """Return the final observations and the episodes that ended, by step."""
    if not endings:
        return [], []
    # The only read of a fragment: the environments that ended in each step.
    ended = torch.stack([ending.ended for ending in endings]).cpu()
    rows = ended.nonzero()[:, 1].to(endings[0].ended.device)
    counts = ended.sum(1).tolist()
    finals, episodes = [], []
    for ending, step_rows in zip(endings, rows.split(counts), strict=True):
        if len(step_rows):
            *observed, returns, lengths, attended = index_rows(ending[2:], step_rows)
            finals.append(FinalObservation(ending.time, step_rows, *observed))
            episodes.append(Episodes(returns, lengths, attended))
    return finals, episodes
