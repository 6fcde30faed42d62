"""One viewer's session: what the page shows, and what a person does."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.timeout import env_call
from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.target import EvaluationTarget, misfit
from marl_pool.perturbations.actions import changes_actions
from marl_pool.perturbations.membership import Inject
from marl_pool.play import messages
from marl_pool.play.episodes import ORDER, Lane, LiveEpisode, LivePerturbation
from marl_pool.play.scenes import rounded, scene_of
from marl_pool.policies.base import head_name
from marl_pool.utils.errors import InputError, UnfitTokensError

Value = TypeVar("Value")
CHOICES = {"occlude": "hidden", "freeze": "frozen", "duplicate": "twice"}
"""By tool, the name of the set of tokens that it chooses."""
INJECTED = Inject.count
"""Distractors at full severity."""


@dataclass
class Session:
    """Policies side by side in equal environments, disturbed by one person.

    Changes of the environment, such as moving an entity, apply to all episodes and
    their twins; changes of perception and of actions apply to the episodes alone. A
    twin thus differs from its episode only in what the policy perceives and in how its
    actions are executed.
    """

    targets: Mapping[str, EvaluationTarget]
    """Policies by name, all in equal environments."""
    seed: int = 0
    """Seed of the episodes."""
    explore: bool = False
    """Sample actions."""

    def __post_init__(self) -> None:
        self.number, self.paused, self.speed = 0, False, 30.0
        # The agent to show, sensors added to the environment, and perturbations.
        self.agent, self.sensors = 0, 0
        self.severities: dict[str, float] = {}
        self.turns: dict[str, int] = {}
        self.chosen: dict[str, set[int]] = {name: set() for name in CHOICES.values()}
        env = self._make_env(next(iter(self.targets.values())))
        self.group = next(iter(env.groups))
        self.scene = scene_of(env)
        # Reasons why perturbations do not fit the tokens.
        self.unfit: dict[str, str] = {}
        for name in ORDER[1:]:
            try:
                perturb({"name": name, "severity": 1.0}, env)
            except InputError as error:
                self.unfit[name] = str(error)
        self.restart()

    # What the page shows.

    def hello(self) -> dict[str, Any]:
        """Return what a page needs only once, JSON-ready."""
        env = self.lanes[0].episode.env
        return {
            "kind": "hello",
            "env": next(iter(self.targets.values())).env["name"],
            "lanes": [
                {"name": lane.name, "head": head_name(lane.target.policies[self.group])}
                for lane in self.lanes
            ],
            "scene": self.scene.describe(env, self.group),
            "agents": env.groups[self.group].num_agents,
            "max_steps": env.max_steps,
            "types": env.groups[self.group].tokens.type_names,
            "perturbations": [
                {
                    "name": name,
                    "unfit": self.unfit.get(name, ""),
                    "of": "actions" if changes_actions(name) else "tokens",
                }
                for name in ORDER[1:]
            ],
            "adds": "inject" not in self.unfit or self.scene.distractors is not None,
        }

    def frame(self) -> dict[str, Any]:
        """Return the current state of all episodes, JSON-ready."""
        return {
            "kind": "frame",
            "number": self.number,
            "seed": self.seed,
            "paused": self.paused,
            "speed": self.speed,
            "agent": self.agent,
            "severities": self.severities,
            "chosen": {
                name: sorted(entities) for name, entities in self.chosen.items()
            },
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
        """Return an episode's state: its scene, and what the shown agent perceives."""
        env, agent, group = episode.env, self.agent, self.group
        action = executed = None
        if group in episode.actions:
            action = episode.chosen(group)[agent].tolist()
            executed = episode.executed[group][agent].tolist()
        with env_call(env, "a picture"):
            scene = self.scene.state(env)
        result: dict[str, Any] = {
            "scene": scene,
            "observer": self.scene.entities(env, group)[agent, 0].item(),
            "steps": episode.steps,
            "return": episode.mean_return(group),
            "over": episode.over,
            "action": action,
            # None where the action was executed as chosen.
            "executed": None if executed == action else executed,
        }
        if episode.over:
            return result
        tokens = episode.perceived()[group]
        state = episode.rollout.perturbation_state(group, agent)
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
            agent_weights = weights[agent]
            result["attention"] = rounded(agent_weights)
            result["entropy"] = relative_entropy(
                agent_weights, tokens.padding[0, agent]
            )
            result["signal"] = self._on_signal(env, agent_weights, moved)
        return result

    def _on_signal(
        self, env: BatchedEnv, weights: Tensor, origin: Sequence[int]
    ) -> float | None:
        """Return the share of attention on tokens that matter for the task."""
        try:
            mask = env.signal()[self.group][0, self.agent].tolist()
        except UnfitTokensError:
            return None
        is_signal = torch.tensor([i >= 0 and mask[i] for i in origin])
        total = float(weights.sum())
        return float(weights[is_signal].sum()) / total if total else None

    # What a person does.

    def act(self, message: messages.AnyMessage) -> None:
        """Carry out a message.

        Raises:
            InputError: a change that a policy or the environment rejects; nothing is
                changed then.
        """
        match message:
            case messages.PauseMessage():
                self.paused = message.on
            case messages.SpeedMessage():
                self.speed = message.value
            case messages.SeedMessage():
                self.seed, self.number = message.value, 0
                self.restart()
            case messages.ObserveMessage():
                agents = self.lanes[0].episode.env.groups[self.group].num_agents
                self.agent = message.agent % agents
            case messages.MoveMessage(entity=entity, x=x, y=y):
                self._on_envs(lambda env: self.scene.move(env, entity, x, y))
            case messages.PushMessage():
                self._on_envs(lambda env: self.scene.push(env, message.value))
            case messages.SeverityMessage():
                self._set_severity(message.name, message.value)
            case messages.DistractorsMessage():
                self._set_distractors(message.value)
            case messages.TokenMessage():
                name = CHOICES[message.do]
                toggled = self.chosen[name] ^ {message.entity}
                choice = {**self.chosen, name: toggled}
                _attempt(self._apply_choice, choice, self.chosen)
            case messages.PlainMessage(do="step"):
                self.paused = True
                self.step()
            case messages.PlainMessage(do="restart"):
                self.restart()
            case messages.PlainMessage(do="next"):
                self.next_episode()
            case messages.PlainMessage(do="shuffle"):
                # Sample another permutation, of all tokens unless a severity is set.
                self.turns["shuffle"] = self.turns.get("shuffle", 0) + 1
                self._set_severity("shuffle", self.severities.get("shuffle") or 1.0)
            case messages.PlainMessage(do="clear"):
                # Undo all changes of perception.
                nothing: dict[str, set[int]] = {name: set() for name in self.chosen}
                _attempt(self._apply_choice, nothing, self.chosen)
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
        """Restart the current episode; severities stay, chosen tokens do not."""
        for entities in self.chosen.values():
            entities.clear()
        lanes: list[Lane] = []
        for name, target in self.targets.items():
            env, live = self._make_env(target), LivePerturbation(turns=self.turns)
            for part, severity in self.severities.items():
                live.put(part, perturb({"name": part, "severity": severity}, env))
            start = partial(LiveEpisode, target, explore=self.explore)
            twin = start(self._make_env(target), None)
            lanes.append(Lane(name, target, live, start(env, live), twin))
        self.lanes = lanes

    def _on_envs(self, change: Callable[[BatchedEnv], None]) -> None:
        for lane in self.lanes:
            for episode in (lane.episode, lane.twin):
                if not episode.over:
                    change(episode.env)
                    if episode.steps == 0:
                        episode.refit()

    def _set_severity(self, name: str, severity: float) -> None:
        if reason := self.unfit.get(name) if severity else None:
            raise InputError(f"{name}: {reason}")
        severities = {k: v for k, v in self.severities.items() if k != name}
        if severity:
            severities[name] = severity
        apply = partial(self._apply_severities, name)
        _attempt(apply, severities, self.severities)

    def _apply_severities(self, name: str, severities: dict[str, float]) -> None:
        """Use these severities, which differ in one part."""
        self.severities = severities
        for lane in self.lanes:
            episode, part = lane.episode, None
            if name in severities:
                config = {"name": name, "severity": severities[name]}
                part = perturb(config, episode.env)
            lane.live.put(name, part)
            if not episode.over:
                for group in episode.env.groups:
                    episode.rollout.change_perturbation(
                        group, partial(lane.live.for_group(group).restart, name=name)
                    )
            else:  # the next episode begins by itself
                env = self._make_env(lane.target)
                episode = LiveEpisode(lane.target, env, lane.live, explore=False)
            episode.check()

    def _apply_choice(self, choice: dict[str, set[int]]) -> None:
        """Occlude, freeze and duplicate these entities, and no others."""
        self.chosen = choice
        for lane in self.lanes:
            episode = lane.episode
            if episode.over:
                continue
            for name, group in episode.env.groups.items():
                chain = lane.live.for_group(name)
                chain.hand.has_self = group.tokens.has_self
                chain.hand.masks = self._masks(episode.env, name)
                episode.rollout.change_perturbation(name, chain.choose)
            episode.check()

    def _masks(self, env: BatchedEnv, group: str) -> dict[str, Tensor]:
        """Return the tokens of the chosen entities; see `Hand`."""
        token_entities = self.scene.entities(env, group)[None]
        return {
            name: torch.isin(token_entities, torch.tensor(sorted(entities)))
            for name, entities in self.chosen.items()
        }

    def _set_distractors(self, count: int) -> None:
        """Add distractors: injected tokens, or more sensors of the environment."""
        option = self.scene.distractors
        if option is None:
            self._set_severity("inject", count / INJECTED)
            return
        before, self.sensors = self.sensors, count
        for target in self.targets.values():
            try:
                env = self._make_env(target)
                if reason := misfit(target.policies, env.groups):
                    raise InputError(reason)
                LiveEpisode(target, env, None, explore=False).check()
            except InputError as error:
                self.sensors = before
                raise InputError(f"{option}: {error}") from None
        self.restart()

    def _make_env(self, target: EvaluationTarget) -> BatchedEnv:
        changes = {}
        if self.sensors and (option := self.scene.distractors):
            changes[option] = target.env.get(option, 0) + self.sensors
        seeded = replace(target, seed=self.seed)
        return seeded.make_env(1, first=self.number, **changes)


def _attempt(apply: Callable[[Value], None], value: Value, old: Value) -> None:
    """Apply a value; apply the old one again if a policy rejects it."""
    try:
        apply(value)
    except InputError:
        apply(old)
        raise


def relative_entropy(weights: Tensor, padding: Tensor) -> float | None:
    """Return the entropy of weights ``(N,)`` as a share of its maximum, if defined."""
    present = weights[~padding]
    total = float(present.sum())
    if len(present) < 2 or not total:
        return None
    shares = present / total
    return float(torch.special.entr(shares).sum()) / math.log(len(present))
