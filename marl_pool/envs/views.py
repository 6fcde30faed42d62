"""PettingZoo and Gymnasium views of one environment: a batch of one."""

import secrets
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from torch import Tensor
from typing_extensions import override

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.contract import CheckedEnv
from marl_pool.options.names import short_name
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import Seed
from marl_pool.policies.action_spaces import ActionRows
from marl_pool.utils.errors import InputError

Observation = dict[str, np.ndarray]
RENDERING = {"render_modes": ["rgb_array"], "render_fps": 10}
"""Metadata of all views."""


class ViewedEnv(CheckedEnv):
    """The environment of a view, which is built anew for each seed of a reset."""

    def __init__(
        self, name: str, num_envs: int, render_mode: str | None, **options: Any
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise InputError(
                f"render_mode: expected None or 'rgb_array', got {render_mode!r}"
            )
        self._build = partial(make_batched_env, name, num_envs, **options)
        self._is_seeded = "seed" in options
        self._begun = False
        super().__init__(self._build())

    def start(self, seed: int | None) -> None:
        """Begin the first episode of a seed, or the next one if it is None."""
        # Without any seed, new views should differ.
        if seed is None and not self._is_seeded:
            seed = secrets.randbits(31)
        if seed is not None:
            check_argument("seed", seed, Seed)
            self._is_seeded = True
            self.env = self._build(seed=int(seed))
        self.reset()
        self._begun = True

    def validate_begun(self, method: str) -> None:
        """Raise InputError for ``step`` or ``render`` before the first reset."""
        if not self._begun:
            raise InputError(f"{method}: expected reset() first, got no episode")


def several_agents(name: str, count: int) -> InputError:
    """Return the error for an environment of several agents in Gymnasium's view."""
    return InputError(
        f"env {name!r}: a Gymnasium view expects one agent, got {count}; "
        "make_env gives all of them"
    )


class ParallelView(ParallelEnv[str, Observation, Any]):
    """One environment behind PettingZoo's ``ParallelEnv``.

    Agents are named ``"<group>_<index>"``. An observation is a dict of NumPy arrays,
    the parts of `marl_pool.tokens.Tokens`, with ``action_mask`` if the group has one
    from the start; a mask that appears only after a reset is in the infos. An agent
    that is no longer alive is terminated. Episodes follow the option ``seed``, starting
    at ``first_episode``; ``reset(seed=…)`` starts over with that seed. Without either,
    the first reset takes a seed from the operating system, so that new views differ.

    Args:
        name: a registered environment, or ``package.module:Class``.
        render_mode: ``"rgb_array"`` or None.
        options: options of the environment's constructor.

    Raises:
        InputError: an unknown name or mode, a wrong option or a number out of range; an
            unknown agent; in `reset`, a seed that is not an integer in [0, 2**63); in
            `step`, no running episode, a living agent without an action, or an invalid
            action (agents that are gone are ignored); in `render`, no episode yet; an
            environment that breaks its contract, also by a number that is NaN or
            infinite.
    """

    def __init__(
        self, name: str, *, render_mode: str | None = None, **options: Any
    ) -> None:
        if "num_envs" in options:
            raise InputError(
                f"env.num_envs: expected a single env in a view of {name!r}, got "
                f"{options['num_envs']!r}; make_batched_env gives many"
            )
        self.render_mode = render_mode
        self._checked = ViewedEnv(name, 1, render_mode, **options)
        env = self.env
        self.metadata = {
            "name": f"{short_name(name)}_v{env.version}",
            "is_parallelizable": True,
            **RENDERING,
        }
        # The group and index of each agent.
        self._places = {
            f"{group}_{number}": (group, number)
            for group, members in env.groups.items()
            for number in range(members.num_agents)
        }
        self.possible_agents = list(self._places)
        self._rows = {
            name: ActionRows(group.action_space) for name, group in env.groups.items()
        }
        self.agents: list[str] = []
        self._playing = False
        groups = {agent: env.groups[g] for agent, (g, _) in self._places.items()}
        # Each agent has its own space, because users seed their samplers one by one.
        self.observation_spaces = {a: g.observation_space() for a, g in groups.items()}
        self.action_spaces = {a: deepcopy(g.action_space) for a, g in groups.items()}

    @property
    def members(self) -> dict[str, list[str]]:
        """The agents of each group of `env`."""
        members: dict[str, list[str]] = {name: [] for name in self.env.groups}
        for agent, (group, _) in self._places.items():
            members[group].append(agent)
        return members

    @property
    def env(self) -> BatchedEnv:
        """A batch of one environment."""
        return self._checked.env

    @override
    def observation_space(self, agent: str) -> spaces.Dict:
        self._validate_agents("observation_space", [agent])
        return self.observation_spaces[agent]

    @override
    def action_space(self, agent: str) -> spaces.Space:
        self._validate_agents("action_space", [agent])
        return self.action_spaces[agent]

    @override
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        self._checked.start(seed)
        self._playing = True
        self.agents = self._living()
        return self._observe(self.agents)

    @override
    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, Observation],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        if not self._playing:
            raise InputError(
                "step: expected reset() first, got an episode that is over or was "
                "never begun"
            )
        step = self._checked.step(self._batch(actions))
        ended, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self._playing = not (ended or truncated)
        living = self._living()
        # Report to agents that acted and to agents that this step brought to life.
        reported = [a for a in self.possible_agents if a in self.agents or a in living]
        self.agents = living if self._playing else []
        observations, infos = self._observe(reported)
        return (
            observations,
            {a: float(step.rewards[g][0, i]) for a, g, i in self._where(reported)},
            {agent: ended or agent not in living for agent in reported},
            dict.fromkeys(reported, truncated),
            infos,
        )

    @override
    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        self._checked.validate_begun("render")
        return self.env.frame()

    def _validate_agents(self, where: str, agents: Iterable[Any]) -> None:
        for agent in agents:
            if agent not in self._places:
                raise InputError(
                    f"{where}: expected agents of {', '.join(self.possible_agents)}, "
                    f"got {agent!r}"
                )

    def _where(self, agents: list[str]) -> list[tuple[str, str, int]]:
        return [(agent, *self._places[agent]) for agent in agents]

    def _living(self) -> list[str]:
        alive = self._checked.presence.alive
        agents = self._where(self.possible_agents)
        return [agent for agent, group, i in agents if alive[group][0, i]]

    def _observe(
        self, agents: list[str]
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """Return observations, and infos with the parts that are in no space."""
        groups = self._checked.observe()
        observations: dict[str, Observation] = {}
        infos: dict[str, dict[str, Any]] = {}
        for agent, group, i in self._where(agents):
            space = self.observation_spaces[agent]
            # Copies, so that a caller cannot modify the environment's tensors.
            columns = groups[group].at((0, i)).columns
            arrays = {name: part.cpu().numpy() for name, part in columns.items()}
            observations[agent] = {
                name: arrays.pop(name).astype(part.dtype)
                for name, part in space.items()
            }
            infos[agent] = {name: part.astype(np.int8) for name, part in arrays.items()}
        return observations, infos

    def _batch(self, actions: dict[str, Any]) -> dict[str, Tensor]:
        """Convert actions to the batched form; agents that are gone get zeros."""
        if not isinstance(actions, Mapping):
            raise InputError(f"actions: expected a dict by agent, got {actions!r:.80}")
        self._validate_agents("actions", actions)
        batch = {
            name: np.zeros(
                (1, group.num_agents, *group.actions.shape),
                np.int64 if group.actions.integral else np.float32,
            )
            for name, group in self.env.groups.items()
        }
        for agent, group_name, i in self._where(self.agents):
            space = self.action_spaces[agent]
            if agent not in actions:
                raise InputError(f"action of {agent!r}: expected {space}, got none")
            try:
                batch[group_name][0, i] = self._rows[group_name].flatten(actions[agent])
            except InputError as error:
                raise InputError(f"action of {agent!r}: {error}") from error
        device = self.env.device
        return {name: torch.from_numpy(a).to(device) for name, a in batch.items()}


class OneAgentView(gymnasium.Env[Observation, Any]):
    """An environment with one agent behind Gymnasium's ``Env``; see `ParallelView`.

    Raises:
        InputError: as for `ParallelView`, or an environment of several agents.
    """

    metadata = dict(RENDERING)  # noqa: RUF012, the base class declares it so

    def __init__(
        self, name: str, *, render_mode: str | None = None, **options: Any
    ) -> None:
        self.view = ParallelView(name, render_mode=render_mode, **options)
        self.render_mode = render_mode
        agents = self.view.possible_agents
        if len(agents) != 1:
            raise several_agents(name, len(agents))
        self.agent = agents[0]
        self.observation_space = self.view.observation_space(self.agent)
        self.action_space = self.view.action_space(self.agent)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observations, infos = self.view.reset(seed=seed, options=options)
        super().reset(seed=None if seed is None else int(seed))
        return observations[self.agent], infos[self.agent]

    @override
    def step(
        self, action: Any
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        results: Any = self.view.step({self.agent: action})
        observation, reward, ended, late, info = (part[self.agent] for part in results)
        return observation, reward, ended, late, info

    @override
    def render(self) -> np.ndarray | None:  # type: ignore[override]
        return self.view.render()
