"""What the copies of an env returned, put down side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.pettingzoo.agents import Team
from marl_pool.envs.pettingzoo.env_copy import Outcome
from marl_pool.envs.pettingzoo.observations import Sight
from marl_pool.utils.errors import InputError


class Batch:
    """One step of some worlds, as arrays; zeros where no agent is.

    Args:
        num_envs: how many worlds.
        teams: by group.
        sights: by group.
        dtype: of rewards.
    """

    def __init__(
        self,
        num_envs: int,
        teams: Mapping[str, Team],
        sights: Mapping[str, Sight],
        dtype: Any,
    ) -> None:
        self.sights = sights
        sizes = {name: len(team.agents) for name, team in teams.items()}
        self.living = {n: np.zeros((num_envs, a), np.bool_) for n, a in sizes.items()}
        self.rewards = {n: np.zeros((num_envs, a), dtype) for n, a in sizes.items()}
        self.seen = {n: sights[n].blank(num_envs, a) for n, a in sizes.items()}
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)
        self._places = {
            agent: (name, i)
            for name, team in teams.items()
            for i, agent in enumerate(team.agents)
        }

    def record(self, row: int, outcome: Outcome) -> None:
        """Put down what one world returned; `PettingZooEnv` says who lives.

        Raises:
            InputError: the env speaks of agents that it did not announce, or gives
                one that lives no observation.
        """
        died, timed_out = outcome.terminations, outcome.truncations
        living = [
            agent
            for agent in outcome.agents
            if not (died.get(agent) or timed_out.get(agent))
        ]
        late = [
            agent
            for agent in outcome.acted
            if timed_out.get(agent) and not died.get(agent)
        ]
        self.terminated[row] = not living and not late
        self.truncated[row] = not living and bool(late)
        for agent in living or late:
            name, column = self._place(agent)
            if agent not in outcome.observations:
                raise InputError(f"env.module: no observation of agent {agent!r} came")
            self.living[name][row, column] = True
            observation = outcome.observations[agent]
            self.sights[name].write(self.seen[name], row, column, observation)
        for agent in outcome.acted:
            name, column = self._place(agent)
            self.rewards[name][row, column] = outcome.rewards.get(agent, 0.0)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Living and observations, by ``group/part``."""
        found = {}
        for name, living in self.living.items():
            found[f"{name}/living"] = torch.from_numpy(living).to(device)
            for part, array in self.seen[name].items():
                tensor = torch.from_numpy(array).to(device)
                real = tensor.is_floating_point()
                found[f"{name}/{part}"] = tensor.to(dtype) if real else tensor
        return found

    def _place(self, agent: Any) -> tuple[str, int]:
        if agent not in self._places:
            raise InputError(
                f"env.module: agent {agent!r} is not one of possible_agents"
            )
        return self._places[agent]
