"""Live episodes, their unperturbed twins, and the perturbations that a person sets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.actions import ActionPerturbation
from marl_pool.perturbations.base import ActionSpace, Perturbation, PerturbationState
from marl_pool.policies.base import Policy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens, append, identity_origin, take_features
from marl_pool.trajectory import Transition
from marl_pool.utils.randomness import Purpose, stream_keys

HAND = "hand"
ORDER = (HAND, *PERTURBATIONS)
"""Order of the chain; shuffle is the last on tokens, so that it moves added ones."""
ONGOING = ("steps", "executed")
"""Entries of the chain's state from which perturbations of actions continue."""


@dataclass(kw_only=True, eq=False)
class Hand(Perturbation):
    """Hide, freeze and duplicate the tokens that a person chose.

    An observer's own token is left alone. An agent that has its first turn later starts
    with the current choice. The state holds ``hidden`` and ``frozen``, ``(1, agents,
    N)`` bool, the ``readings`` of the frozen tokens, and ``copies`` ``(1, agents, C)``,
    the indices of duplicated tokens or -1.
    """

    has_self: bool = True
    """True if tokens of type 0 are the observer's own."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """The choice: ``hidden``, ``frozen`` and ``twice``, ``(1, agents, N)`` bool; none
    where one is missing."""

    @override
    def start(
        self, tokens: Tokens, keys: Tensor, *_: Any, **__: Any
    ) -> PerturbationState:
        return self.choose(tokens)

    def choose(
        self, tokens: Tokens, old: PerturbationState | None = None
    ) -> PerturbationState:
        """Return the state for the choice; tokens already frozen keep their readings.

        ``tokens`` are the current ones, with batch ``(1, agents)``.
        """
        none = torch.zeros_like(tokens.padding)
        hidden, frozen, twice = (
            none | self.masks.get(name, none) for name in ("hidden", "frozen", "twice")
        )
        readings = tokens.features.clone()
        if old is not None:
            readings = torch.where(old["frozen"][..., None], old["readings"], readings)
        # Copies keep the order of tokens; agents with fewer of them get empty slots.
        # Their number must not depend on the tokens, which agents see at other times.
        count = int(twice.sum(-1).max())
        order = (~twice).byte().argsort(dim=-1, stable=True)[..., :count]
        copies = order.masked_fill(~twice.gather(-1, order), -1)
        origin = torch.cat([identity_origin(tokens), copies], -1)
        kept = {"hidden": hidden, "frozen": frozen, "readings": readings}
        return {**kept, "copies": copies, "origin": origin}

    @override
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        free = (tokens.types != SELF_TYPE) | (not self.has_self)
        frozen, copies = (state["frozen"] & free)[..., None], state["copies"]
        features = torch.where(frozen, state["readings"], tokens.features)
        perceived = tokens._replace(
            features=features, padding=tokens.padding | (state["hidden"] & free)
        )
        if copies.shape[-1]:
            source = copies.clamp(min=0)
            absent = perceived.padding | ~free
            added = Tokens(
                take_features(features, source),
                perceived.types.gather(-1, source),
                absent.gather(-1, source) | (copies < 0),
            )
            perceived = append(perceived, added)
        return perceived, state


@dataclass(kw_only=True, eq=False)
class LivePerturbation(Perturbation):
    """Chain of perturbations, each of which may start or stop at any step.

    Every part has separate random numbers, which do not depend on the others. The
    state of a part has the prefix ``"name/"``; ``origin`` belongs to the whole chain,
    ``executed`` are the actions of the latest step, and ``steps`` counts observations.
    """

    parts: dict[str, Perturbation] = field(default_factory=lambda: {HAND: Hand()})
    """Active perturbations by name, in the order of `ORDER`."""
    turns: dict[str, int] = field(default_factory=dict)
    """Number of times each part was resampled on request."""
    chains: dict[str, "LivePerturbation"] = field(default_factory=dict)
    """Chain of each group of agents, of parts that fit its tokens."""

    @override
    def for_group(self, group: str) -> "LivePerturbation":
        if group not in self.chains:
            parts = {name: part.for_group(group) for name, part in self.parts.items()}
            # Each group has its own choice.
            parts[HAND] = Hand()
            self.chains[group] = LivePerturbation(parts=parts, turns=self.turns)
        return self.chains[group]

    def put(self, name: str, part: Perturbation | None) -> None:
        """Insert, replace or (None) remove a part; `restart` its state afterwards."""
        parts = {**self.parts, name: part}
        self.parts = {n: p for n in ORDER if (p := parts.get(n)) is not None}
        for group, chain in self.chains.items():
            chain.put(name, part and part.for_group(group))

    @override
    def start(
        self, tokens: Tokens, keys: Tensor, *_: Any, **__: Any
    ) -> PerturbationState:
        return self.restart(tokens, {"keys": keys, "steps": torch.zeros_like(keys)})

    def restart(
        self, tokens: Tokens, state: PerturbationState, name: str = ""
    ) -> PerturbationState:
        """Return the state with the part ``name`` restarted, and new parts started.

        Other parts continue, unless they now receive another number of tokens.
        """
        true = tokens
        common = {key: value for key, value in state.items() if "/" not in key}
        result = {**common, "origin": identity_origin(tokens)}
        for part_name, part in self.parts.items():
            size = torch.full_like(state["keys"], tokens.num_tokens)
            part_state = _unprefixed(part_name, state)
            is_fitting = bool(part_state) and part_state["size"].equal(size)
            if part_name == name or not is_fitting:
                turn, place = self.turns.get(part_name, 0), ORDER.index(part_name)
                keys = stream_keys(
                    turn,
                    state["keys"],
                    torch.full_like(state["keys"], place),
                    Purpose.PERTURBATION,
                )
                part_state = part.start(tokens, keys) | {"size": size}
                if isinstance(part, ActionPerturbation):
                    # Continue at this step of the episode, with the action to repeat.
                    part_state |= {k: v for k, v in common.items() if k in ONGOING}
                    if tokens.action_mask is not None:
                        part_state["allowed"] = tokens.action_mask
            # The next part starts from the tokens that this one returns.
            tokens, _ = part(tokens, part_state)
            result |= _prefixed(part_name, part_state)
        # A paused page shows these tokens before the next step.
        return {**result, "origin": self(true, result)[1]["origin"]}

    @property
    def hand(self) -> Hand:
        """The part that a person's choice of tokens sets."""
        hand = self.parts[HAND]
        assert isinstance(hand, Hand)
        return hand

    def choose(self, tokens: Tokens, state: PerturbationState) -> PerturbationState:
        """Return the state for a changed choice of the `hand`."""
        old = _unprefixed(HAND, state)
        hand_state = {**self.hand.choose(tokens, old), "size": old["size"]}
        return self.restart(tokens, {**state, **_prefixed(HAND, hand_state)})

    @override
    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        origin, result = identity_origin(tokens), dict(state)
        for name, part in self.parts.items():
            tokens, part_state = part(tokens, _unprefixed(name, state))
            result |= _prefixed(name, part_state)
            if "origin" in part_state:
                moved = part_state["origin"]
                origin = origin.gather(-1, moved.clamp(min=0))
                origin = origin.masked_fill(moved < 0, -1)
        return tokens, {**result, "origin": origin, "steps": state["steps"] + 1}

    @override
    def act(
        self,
        actions: Tensor,
        state: PerturbationState,
        space: ActionSpace,
    ) -> tuple[Tensor, PerturbationState]:
        result = dict(state)
        for name, part in self.parts.items():
            actions, part_state = part.act(actions, _unprefixed(name, state), space)
            result |= _prefixed(name, part_state)
        return actions, {**result, "executed": actions}


class LiveEpisode:
    """One episode of one policy, stepped on request.

    ``env`` is one environment, which is reset. A twin has no perturbation. ``explore``
    samples actions.
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
        # Agents that have been alive in the episode, as in `Episodes.attended`.
        self.attended = {name: alive[0] for name, alive in env.alive.items()}
        self.steps, self.over = 0, ""
        # Latest actions by group, `(agents, …)`: as the policy chose them, and as the
        # environment executed them, clipped to their range.
        self.actions: dict[str, Tensor] = {}
        self.executed: dict[str, Tensor] = {}

    def step(self) -> None:
        """Take a step, unless the episode is over."""
        if self.over:
            return
        for name, alive in self.env.alive.items():
            self.attended[name] = self.attended[name] | alive[0]
        transition = next(self.transitions)
        self.steps += 1
        for name, rewards in transition.step.rewards.items():
            self.returns[name] += rewards[0]
            clipped = self.env.groups[name].actions.clip(transition.executed[name][0])
            self.actions[name] = self._received(transition.actions[name][0])
            self.executed[name] = self._received(clipped)
        if transition.step.terminated[0]:
            self.over = "terminated"
        elif transition.step.truncated[0]:
            self.over = "time is up"

    def mean_return(self, group: str) -> float:
        """Return the mean return so far, over agents that have been alive."""
        num_agents = self.attended[group].sum().clamp(min=1)
        return float(self.returns[group].sum() / num_agents)

    def _received(self, actions: Tensor) -> Tensor:
        """Return actions in the environment's dtype.

        In float64 the last bits depend on the order of the tokens.
        """
        return actions.to(self.env.dtype) if actions.is_floating_point() else actions

    def chosen(self, group: str) -> Tensor:
        """Return the latest actions as the environment would clip them."""
        return self.env.groups[group].actions.clip(self.actions[group])

    def perceived(self) -> dict[str, Tokens]:
        """Return what the policies see now, and act on in the next step."""
        # The rollout has perturbed the first observation already.
        return self.rollout.tokens if self.steps == 0 else self.rollout.perceived()

    def attention(self, tokens: Tokens, group: str) -> Tensor | None:
        """Return attention weights ``(agents, N)`` of tokens, averaged over heads."""
        policy, state = self.rollout.policies[group], self.rollout.states[group]
        with torch.no_grad():
            weights = policy.attention_weights(tokens, state)
        return None if weights is None else weights[0].mean(1)

    def refit(self) -> None:
        """Adapt to a changed perturbation.

        The observation of an episode's first step is perturbed again, and recurrent
        policies get memory for tokens that were added.
        """
        if self.steps == 0:
            self.rollout.tokens = self.rollout.perceived()
        states, policies = self.rollout.states, self.rollout.policies
        for name, tokens in self.perceived().items():
            states[name] = resized(policies[name], states[name], tokens)

    def check(self) -> None:
        """Let the policies act once, which raises if they cannot."""
        self.refit()
        for group, tokens in self.perceived().items():
            with torch.no_grad():
                self.rollout.policies[group].act(tokens, self.rollout.states[group])


@dataclass
class Lane:
    """A policy's perturbed episode, and its unperturbed twin."""

    name: str
    target: EvaluationTarget
    live: LivePerturbation
    """Perturbation of the episode."""
    episode: LiveEpisode
    twin: LiveEpisode
    parted: int | None = None
    """Step in which their actions first differed, as chosen or as executed."""

    def step(self) -> None:
        """Step both, and compare their actions."""
        self.episode.step()
        self.twin.step()
        episode, twin = (
            [*live.actions.values(), *live.executed.values()]
            for live in (self.episode, self.twin)
        )
        if self.parted is None and not all(map(torch.equal, episode, twin)):
            self.parted = self.episode.steps


def resized(policy: Policy, state: State, tokens: Tokens) -> State:
    """Fit a recurrent state to the number of tokens; added ones get initial states."""
    num_envs, num_agents = tokens.batch_shape
    fresh = policy.initial_state(num_envs, num_agents, tokens.num_tokens)

    def fit(new: Tensor, old: Tensor) -> Tensor:
        if new.shape == old.shape:
            return old
        # Only the token dimension can differ.
        result = new.to(old.dtype).clone()
        kept = tuple(
            slice(min(a, b)) for a, b in zip(new.shape, old.shape, strict=True)
        )
        result[kept] = old[kept]
        return result

    return tree_map(fit, fresh, state)


def _unprefixed(name: str, state: PerturbationState) -> PerturbationState:
    prefix = f"{name}/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _prefixed(name: str, state: PerturbationState) -> PerturbationState:
    return {f"{name}/{key}": value for key, value in state.items()}
