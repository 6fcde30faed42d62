"""One viewer's session: each policy's episode beside its unperturbed twin."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.loading import EvaluationTarget, misfit
from marl_pool.perturbations.inject import Inject
from marl_pool.play.live import HAND, ORDER, LivePerturbation, own_tokens
from marl_pool.play.messages import (
    AnyMessage,
    DistractorsMessage,
    MoveMessage,
    ObserveMessage,
    PauseMessage,
    PlainMessage,
    PushMessage,
    SeedMessage,
    SeverityMessage,
    SpeedMessage,
    TokenMessage,
)
from marl_pool.play.scenes import Scene, rounded, scene_of
from marl_pool.policies.base import Policy, State
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, UnfitTokensError

CHOICES = {"occlude": "hidden", "freeze": "frozen", "duplicate": "twice"}
"""By tool: the name of the tokens that it has chosen."""
INJECTED = Inject.count
"""Distractors at full severity."""


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
            # As the environment receives it: in float64 its last bits depend on the
            # order of the tokens.
            action = self.rollout.policies[name].scale(
                transition.decisions[name].action[0]
            )
            self.actions[name] = (
                action.float() if action.is_floating_point() else action
            )
        if transition.step.terminated[0]:
            self.over = "terminated"
        elif transition.step.truncated[0]:
            self.over = "time is up"

    def perceived(self) -> dict[str, Tokens]:
        """Return what the policies see now, and act on in the next step."""
        observed, states = self.env.observe(), self.rollout.perturbation_states
        if self.perturbation is None:
            return observed
        if self.steps == 0:  # the rollout has perturbed the first observation already
            return self.rollout.tokens
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
        if self.steps == 0 and self.perturbation is not None:
            tokens, states = self.env.observe(), self.rollout.perturbation_states
            self.rollout.tokens = {
                name: self.perturbation(own, states[name])[0]
                for name, own in tokens.items()
            }
        states, policies = self.rollout.states, self.rollout.policies
        for name, seen in self.perceived().items():
            states[name] = resized(policies[name], states[name], seen)


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


@dataclass
class Session:
    """Policies side by side in one environment, under the hand of one person.

    Changes of the environment, such as moving an entity, act on all episodes and
    their twins; changes of perception on the episodes alone. So a twin differs from
    its episode in what the policy perceives, and in nothing else.

    Args:
        targets: policies by name, all in equal environments.
        seed: of the episodes.
        explore: sample actions.
    """

    targets: Mapping[str, EvaluationTarget]
    seed: int = 0
    explore: bool = False
    lanes: list[Lane] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.number, self.paused, self.speed = 0, False, 30.0
        # Sensors added to the environment, and the perturbations' strengths and turns.
        self.agent, self.sensors = 0, 0
        self.severities: dict[str, float] = {}
        self.turns: dict[str, int] = {}
        self.chosen: dict[str, set[int]] = {
            "hidden": set(),
            "frozen": set(),
            "twice": set(),
        }
        env = self._make_env(next(iter(self.targets.values())))
        self.group = next(iter(env.groups))
        self.scene: Scene = scene_of(env)
        self.unfit = self._unfit(env)
        self.restart()

    # What the page shows.

    def hello(self) -> dict[str, Any]:
        """Return what a page needs once, JSON-ready."""
        env = self.lanes[0].episode.env
        adds = "inject" not in self.unfit or self.scene.distractors is not None
        return {
            "kind": "hello",
            "env": next(iter(self.targets.values())).env["name"],
            "lanes": [
                {"name": lane.name, "head": head_of(lane.target.policies[self.group])}
                for lane in self.lanes
            ],
            "scene": self.scene.describe(env, self.group),
            "agents": env.groups[self.group].num_agents,
            "max_steps": env.max_steps,
            "types": env.groups[self.group].tokens.type_names,
            "perturbations": [
                {"name": name, "unfit": self.unfit.get(name, "")}
                for name in ORDER
                if name != HAND
            ],
            "adds": adds,
        }

    def frame(self) -> dict[str, Any]:
        """Return the present moment of all episodes, JSON-ready."""
        chosen = {name: sorted(entities) for name, entities in self.chosen.items()}
        return {
            "kind": "frame",
            "number": self.number,
            "seed": self.seed,
            "paused": self.paused,
            "speed": self.speed,
            "agent": self.agent,
            "severities": self.severities,
            "chosen": chosen,
            "distractors": self.sensors
            or round(self.severities.get("inject", 0) * INJECTED),
            "lanes": [
                {
                    "parted": lane.parted,
                    "episode": self._moment(lane.episode),
                    "twin": self._moment(lane.twin),
                }
                for lane in self.lanes
            ],
        }

    def _moment(self, episode: LiveEpisode) -> dict[str, Any]:
        """Return one episode: its scene, and the perception of the chosen agent."""
        env, agent, group = episode.env, self.agent, self.group
        action = episode.actions.get(group)
        result: dict[str, Any] = {
            "scene": self.scene.state(env),
            "observer": self.scene.entities(env, group)[agent, 0].item(),
            "steps": episode.steps,
            "return": float(episode.returns[group].mean()),
            "over": episode.over,
            "action": None if action is None else action[agent].tolist(),
        }
        if episode.over:
            return result
        tokens = episode.perceived()[group]
        state = episode.rollout.perturbation_states.get(group, {})
        count = tokens.num_tokens
        moved = state["origin"][0, agent].tolist() if state else list(range(count))
        entities = self.scene.entities(env, group)[agent].tolist()
        result["tokens"] = {
            "entity": [entities[i] if i >= 0 else -1 for i in moved],
            "padding": tokens.padding[0, agent].int().tolist(),
            "types": tokens.types[0, agent].tolist(),
            "places": self.scene.places(env, tokens, agent),
        }
        if env.patch_grid is None and result["tokens"]["places"] is None:
            result["tokens"]["readings"] = rounded(tokens.features[0, agent, :, -1])
        weights = episode.attention(tokens, group)
        if weights is not None:
            own = weights[agent]
            result["attention"] = rounded(own)
            result["entropy"] = relative_entropy(own, tokens.padding[0, agent])
            result["signal"] = self._on_signal(env, own, moved)
        return result

    def _on_signal(
        self, env: BatchedEnv, weights: Tensor, origin: Sequence[int]
    ) -> float | None:
        """Return the share of attention on tokens that matter for the task."""
        try:
            mask = env.signal()[self.group][0, self.agent].tolist()
        except UnfitTokensError:
            return None
        useful = torch.tensor([i >= 0 and mask[i] for i in origin])
        total = float(weights.sum())
        return float(weights[useful].sum()) / total if total else None

    # What a person does.

    def act(self, message: AnyMessage) -> None:
        """Carry out a message.

        Raises:
            InputError: a change that a policy or the environment cannot take; nothing
                is changed then.
        """
        match message:
            case PauseMessage():
                self.paused = message.on
            case SpeedMessage():
                self.speed = message.value
            case SeedMessage():
                self.seed, self.number = message.value, 0
                self.restart()
            case ObserveMessage():
                agents = self.lanes[0].episode.env.groups[self.group].num_agents
                self.agent = message.agent % agents
            case MoveMessage(entity=entity, x=x, y=y):
                self._on_envs(lambda env: self.scene.move(env, entity, x, y))
            case PushMessage():
                self._on_envs(lambda env: self.scene.push(env, message.value))
            case SeverityMessage():
                self._set_severity(message.name, message.value)
            case DistractorsMessage():
                self._set_distractors(message.value)
            case TokenMessage():
                name = CHOICES[message.do]
                toggled = self.chosen[name] ^ {message.entity}
                self._choose({**self.chosen, name: toggled})
            case PlainMessage():
                {
                    "step": self._step_once,
                    "restart": self.restart,
                    "next": self.next_episode,
                    "shuffle": self._shuffle,
                    "clear": self._clear,
                }[message.do]()

    def _step_once(self) -> None:
        self.paused = True
        self.step()

    def _shuffle(self) -> None:
        """Sample another permutation, of all tokens unless a severity is set."""
        self.turns["shuffle"] = self.turns.get("shuffle", 0) + 1
        self._set_severity("shuffle", self.severities.get("shuffle") or 1.0)

    def _clear(self) -> None:
        """Undo all changes of perception."""
        self._choose({name: set() for name in self.chosen})
        for name in list(self.severities):
            self._set_severity(name, 0.0)
        if self.sensors:
            self._set_distractors(0)

    def step(self) -> None:
        """Step all episodes that are not over."""
        for lane in self.lanes:
            lane.step()

    @property
    def over(self) -> bool:
        """True once all episodes are over."""
        return all(lane.episode.over and lane.twin.over for lane in self.lanes)

    def next_episode(self) -> None:
        """Start the next episode."""
        self.number += 1
        self.restart()

    def restart(self) -> None:
        """Start the present episode again; severities stay, chosen tokens do not."""
        for entities in self.chosen.values():
            entities.clear()
        lanes: list[Lane] = []
        for name, target in self.targets.items():
            env, live = self._make_env(target), LivePerturbation(turns=self.turns)
            for part, severity in self.severities.items():
                live.put(part, perturb({"name": part, "severity": severity}, env))
            start = partial(LiveEpisode, target, explore=self.explore)
            twin = start(self._make_env(target), None)
            lanes.append(Lane(name, target, start(env, live), twin))
        self.lanes = lanes

    def _on_envs(self, change: Callable[[BatchedEnv], None]) -> None:
        """Change the environments of all episodes that are not over."""
        for lane in self.lanes:
            for episode in (lane.episode, lane.twin):
                if not episode.over:
                    change(episode.env)
                    if episode.steps == 0:
                        episode.rollout.tokens = episode.env.observe()
                        episode.refit()

    def _set_severity(self, name: str, severity: float) -> None:
        if reason := self.unfit.get(name) if severity else None:
            raise InputError(f"{name}: {reason}")
        before = dict(self.severities)
        self.severities.pop(name, None)
        if severity:
            self.severities[name] = severity
        self._try(name, before)

    def _try(self, name: str, before: dict[str, float]) -> None:
        """Apply the severity of one part to all lanes; undo it if a policy refuses."""
        try:
            for lane in self.lanes:
                self._apply(lane, name)
        except InputError:
            after, self.severities = self.severities, before
            if after != before:
                self._try(name, before)
            raise

    def _apply(self, lane: Lane, name: str) -> None:
        episode, live = lane.episode, lane.live
        severity = self.severities.get(name)
        part = None
        if severity is not None:
            part = perturb({"name": name, "severity": severity}, episode.env)
        live.put(name, part)
        if episode.over:
            return
        states = episode.rollout.perturbation_states
        for group, tokens in episode.env.observe().items():
            states[group] = live.restart(tokens, states[group], name)
        self._check(episode)

    def _check(self, episode: LiveEpisode) -> None:
        """Let the policies decide once, which raises where they cannot."""
        rollout = episode.rollout
        episode.refit()
        for group, tokens in episode.perceived().items():
            with torch.no_grad():
                rollout.policies[group].act(tokens, rollout.states[group])

    def _choose(self, chosen: dict[str, set[int]]) -> None:
        """Occlude, freeze and duplicate these entities, and no others."""
        before = self.chosen
        try:
            self._apply_choice(chosen)
        except InputError:
            self._apply_choice(before)
            raise

    def _apply_choice(self, chosen: dict[str, set[int]]) -> None:
        self.chosen = chosen
        for lane in self.lanes:
            episode = lane.episode
            if episode.over:
                continue
            states = episode.rollout.perturbation_states
            for group, tokens in episode.env.observe().items():
                shown = self.scene.entities(episode.env, group)[None]
                spec = episode.env.groups[group].tokens
                free = ~own_tokens(tokens, has_self=spec.has_self)
                masks = {
                    name: torch.isin(shown, torch.tensor(sorted(entities))) & free
                    for name, entities in chosen.items()
                }
                states[group] = lane.live.choose(tokens, states[group], masks)
            self._check(episode)

    def _set_distractors(self, count: int) -> None:
        """Add distractors: injected tokens, or more sensors of the environment."""
        option = self.scene.distractors
        if option is None:
            self._set_severity("inject", count / INJECTED)
            return
        before, self.sensors = self.sensors, count
        for target in self.targets.values():
            groups = self._make_env(target).groups
            reason = misfit(target.policies, groups)
            if not reason:
                reason = self._refusal(target)
            if reason:
                self.sensors = before
                raise InputError(f"{option}: {reason}")
        self.restart()

    def _refusal(self, target: EvaluationTarget) -> str:
        """Return the reason why policies cannot act on more tokens, or nothing."""
        try:
            episode = LiveEpisode(target, self._make_env(target), None, explore=False)
            self._check(episode)
        except InputError as error:
            return str(error)
        return ""

    def _make_env(self, target: EvaluationTarget) -> BatchedEnv:
        changes = {}
        if self.sensors and (option := self.scene.distractors):
            changes[option] = target.env.get(option, 0) + self.sensors
        seeded = replace(target, seed=self.seed)
        return seeded.make_env(1, first=self.number, **changes)

    def _unfit(self, env: BatchedEnv) -> dict[str, str]:
        """Return the perturbations that do not fit the tokens, with the reason."""
        reasons = {}
        for name in ORDER[1:]:
            try:
                perturb({"name": name, "severity": 1.0}, env)
            except InputError as error:
                reasons[name] = str(error)
        return reasons


def head_of(policy: Policy) -> str:
    """Return the name of a policy's pooling head, or of its class."""
    network = getattr(policy, "network", None)
    head = getattr(policy, "sensor", None) or getattr(network, "pooling", policy)
    return type(head).__name__.removesuffix("Pooling")


def relative_entropy(weights: Tensor, padding: Tensor) -> float | None:
    """Return the entropy of weights ``(N,)`` as a share of the largest possible."""
    present = weights[~padding]
    total = float(present.sum())
    if len(present) < 2 or not total:
        return None
    shares = present / total
    return float(torch.special.entr(shares).sum()) / math.log(len(present))


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
