"""Gymnasium environments as PettingZoo's: of one agent, or of several in Tuples."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_pool.utils.errors import InputError

ByAgent = dict[str, Any]


class GymnasiumAgents(ParallelEnv[str, Any, Any]):
    """A Gymnasium environment behind PettingZoo's ``ParallelEnv``.

    Where observations and actions are Tuples of one length, as in level-based foraging
    and the robotic warehouse, each entry is an agent. Otherwise there is one agent.
    Agents are named ``agent_0``, ``agent_1`` and so on. They all end together. A single
    reward is that of every agent.

    Args:
        env: the environment.

    Raises:
        InputError: in `step`, another number of rewards than agents, or flags that
            differ between agents.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.metadata = {**env.metadata, "name": type(env.unwrapped).__name__}
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
        observation, _ = self.env.reset(seed=seed, options=options)
        self.agents = [*self.possible_agents]
        return self._by_agent(observation), {agent: {} for agent in self.agents}

    @override
    def step(
        self, actions: ByAgent
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, dict[str, Any]]]:
        ordered = tuple(actions[agent] for agent in self.possible_agents)
        observation, reward, terminated, truncated, _ = self.env.step(
            ordered[0] if self.single else ordered
        )
        agents, count = self.possible_agents, len(self.possible_agents)
        rewards = np.asarray(reward, np.float64).reshape(-1)
        if len(rewards) not in (1, count):
            raise InputError(
                f"env.module: expected a reward or one for each of {count} agents, "
                f"got {len(rewards)}"
            )
        flags = [np.asarray(flag).reshape(-1) for flag in (terminated, truncated)]
        if any(len(set(flag.tolist())) != 1 for flag in flags):
            raise InputError(
                "env.module: expected flags that end all agents together, got "
                f"terminated {terminated} and truncated {truncated}"
            )
        terminations, truncations = (bool(flag[0]) for flag in flags)
        if terminations or truncations:
            self.agents = []
        return (
            self._by_agent(observation),
            dict(zip(agents, np.broadcast_to(rewards, count).tolist(), strict=True)),
            dict.fromkeys(agents, terminations),
            dict.fromkeys(agents, truncations),
            {agent: {} for agent in agents},
        )

    @override
    def render(self) -> Any:
        return self.env.render()

    @override
    def close(self) -> None:
        self.env.close()

    def _by_agent(self, observation: Any) -> ByAgent:
        observations = (observation,) if self.single else observation
        return dict(zip(self.possible_agents, observations, strict=True))
