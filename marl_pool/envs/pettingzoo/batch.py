"""Results of one step of several PettingZoo environments, as arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.pettingzoo.agents import PettingZooTeam
from marl_pool.envs.pettingzoo.env_copy import ParallelStep
from marl_pool.envs.pettingzoo.observations import ObservationAdapter
from marl_pool.utils.errors import InputError


class StepArrays:
    """Arrays ``(num_envs, agents, …)`` by group; 0 for absent agents.

    Args:
        num_envs: number of environments.
        teams: teams by group.
        adapters: observation adapters by group.
        dtype: dtype of rewards.
    """

    def __init__(
        self,
        num_envs: int,
        teams: Mapping[str, PettingZooTeam],
        adapters: Mapping[str, ObservationAdapter],
        dtype: Any,
    ) -> None:
        self.adapters = adapters
        sizes = {name: len(team.agents) for name, team in teams.items()}
        self.active = {n: np.zeros((num_envs, a), np.bool_) for n, a in sizes.items()}
        self.rewards = {n: np.zeros((num_envs, a), dtype) for n, a in sizes.items()}
        self.observations = {
            name: adapters[name].zeros(num_envs, agents)
            for name, agents in sizes.items()
        }
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)
        self._columns = {
            agent: (name, i)
            for name, team in teams.items()
            for i, agent in enumerate(team.agents)
        }

    def write(self, row: int, step: ParallelStep) -> None:
        """Write the step of one environment.

        Raises:
            InputError: an agent that is not in possible_agents, or an active agent
                without an observation.
        """
        terminated, truncated = step.terminations, step.truncations
        active = [
            agent
            for agent in step.agents
            if not (terminated.get(agent) or truncated.get(agent))
        ]
        # When the last agents leave, those that are truncated stay active, so that
        # their values are bootstrapped.
        timed_out = [
            agent
            for agent in step.acted
            if truncated.get(agent) and not terminated.get(agent)
        ]
        self.terminated[row] = not active and not timed_out
        self.truncated[row] = not active and bool(timed_out)
        for agent in active or timed_out:
            name, column = self._column(agent)
            if agent not in step.observations:
                raise InputError(
                    f"env.module: expected an observation of agent {agent!r}, got none"
                )
            self.active[name][row, column] = True
            observation = step.observations[agent]
            self.adapters[name].write(self.observations[name], row, column, observation)
        for agent in step.acted:
            name, column = self._column(agent)
            self.rewards[name][row, column] = step.rewards.get(agent, 0.0)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return active agents and observations, by ``group/part``."""
        tensors = {}
        for name, active in self.active.items():
            tensors[f"{name}/active"] = torch.from_numpy(active).to(device)
            for part, array in self.observations[name].items():
                tensor = torch.from_numpy(array).to(device)
                real = tensor.is_floating_point()
                tensors[f"{name}/{part}"] = tensor.to(dtype) if real else tensor
        return tensors

    def _column(self, agent: Any) -> tuple[str, int]:
        if agent not in self._columns:
            raise InputError(
                f"env.module: expected one of possible_agents, got agent {agent!r}"
            )
        return self._columns[agent]
