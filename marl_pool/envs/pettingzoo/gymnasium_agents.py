"""Gymnasium environments behind PettingZoo's API: one agent, or several in Tuples."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_pool.envs.pettingzoo.life import error_at, split
from marl_pool.observations.parts import as_array

ByAgent = dict[str, Any]
RESET_PARTS = ("observation", "info")
FLAGS = ("terminated", "truncated")
STEP_PARTS = ("observation", "reward", *FLAGS, "info")


class GymnasiumAgents(ParallelEnv[str, Any, Any]):
    """A Gymnasium environment behind PettingZoo's ``ParallelEnv``.

    Where observations and actions are Tuples of equal length, as in level-based
    foraging and the robotic warehouse, each entry is an agent. Otherwise there is one
    agent. Agents are named ``agent_0``, ``agent_1`` and so on. They all end together. A
    reward that is a single number goes to every agent.

    Args:
        env: the environment.

    Raises:
        InputError: in `reset` and `step`, results that are not Gymnasium's, another
            number of observations or rewards than agents, or flags that differ.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.render_mode = env.render_mode
        observed, acted = env.observation_space, env.action_space
        self.single = not (
            isinstance(observed, spaces.Tuple)
            and isinstance(acted, spaces.Tuple)
            and len(observed) == len(acted)
        )
        if self.single:
            self._spaces = [(observed, acted)]
        else:
            pairs = zip(observed.spaces, acted.spaces, strict=True)  # type: ignore[attr-defined]
            self._spaces = [*pairs]
        self.possible_agents = [f"agent_{i}" for i in range(len(self._spaces))]
        self.agents: list[str] = []
        self.number = 0
        """Steps taken in the episode."""

    @property
    def unwrapped(self) -> Any:
        """The environment below all wrappers."""
        return self.env.unwrapped

    @override
    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[self.possible_agents.index(agent)][0]

    @override
    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[self.possible_agents.index(agent)][1]

    @override
    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ByAgent, dict[str, dict[str, Any]]]:
        self.number = 0
        result = self.env.reset(seed=seed)
        observation, info = split(result, RESET_PARTS, self.number, ["info"])
        self.agents = [*self.possible_agents]
        return self._by_agent(observation), self._infos(info)

    @override
    def step(
        self, actions: ByAgent
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, dict[str, Any]]]:
        agents = self.possible_agents
        ordered = tuple(actions[agent] for agent in agents)
        self.number += 1
        result = self.env.step(ordered[0] if self.single else ordered)
        parts = split(result, STEP_PARTS, self.number, ["info"])
        observation, reward, *flags, info = parts
        terminated, truncated = map(self._flag, FLAGS, flags)
        if terminated or truncated:
            self.agents = []
        return (
            self._by_agent(observation),
            dict(zip(agents, self._rewards(reward), strict=True)),
            dict.fromkeys(agents, terminated),
            dict.fromkeys(agents, truncated),
            self._infos(info),
        )

    @override
    def render(self) -> Any:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()

    @override
    def state(self) -> Any:
        return self.unwrapped.state()

    def _by_agent(self, observation: Any) -> ByAgent:
        agents = self.possible_agents
        observations = (observation,) if self.single else observation
        counted = isinstance(observations, tuple | list | np.ndarray)
        if not counted or len(observations) != len(agents):
            actual = len(observations) if counted else type(observations).__name__
            expected = f"expected observations of {len(agents)} agents"
            raise error_at(self.number, f"{expected}, got {actual}")
        return dict(zip(agents, observations, strict=True))

    def _infos(self, info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return each agent's info; a single agent's is the environment's."""
        if self.single:
            return {self.possible_agents[0]: dict(info)}
        return {agent: {} for agent in self.possible_agents}

    def _rewards(self, reward: Any) -> list[float]:
        count, rewards = len(self.possible_agents), as_array(reward)
        if (
            rewards is None
            or rewards.dtype.kind not in "biuf"
            or rewards.size not in (1, count)
        ):
            raise error_at(
                self.number,
                f"reward: expected one number, or one of each of {count} agents, got "
                f"{reward!r:.80}",
            )
        return [float(number) for number in np.broadcast_to(rewards.reshape(-1), count)]

    def _flag(self, name: str, flag: Any) -> bool:
        array = as_array(flag)
        flags = np.empty(0) if array is None else array.reshape(-1)
        if flags.dtype != np.bool_ or len(set(flags.tolist())) != 1:
            raise error_at(
                self.number,
                f"{name}: expected True or False, the same of all agents, got "
                f"{flag!r:.80}",
            )
        return bool(flags[0])
