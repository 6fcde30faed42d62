"""A PettingZoo env whose agents come and go, for tests of the adapter."""

from typing import ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

# Made once: each step looks up a space for each agent, and making one takes longer.
OBSERVATIONS = {
    size: spaces.Box(-np.inf, np.inf, (size,), np.float32) for size in (4, 5)
}
CHOICE, BOX = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)


class ChangingAgents(ParallelEnv):
    """Wolves with continuous actions and hens with discrete ones.

    In each step an agent may terminate, rarely be truncated alone, or be born (again).
    An agent observes its index, the step, its last action and how many agents acted.

    Args:
        wolves: largest number of wolves.
        hens: largest number of hens.
        death: probability that an agent terminates in a step.
        birth: probability that an absent agent is born in a step.
        alone: probability that an agent is truncated in mid-episode.
        horizon: steps after which all living agents are truncated.
        render_mode: "rgb_array" or None.
    """

    metadata: ClassVar = {"name": "changing_agents", "render_modes": ["rgb_array"]}

    def __init__(
        self,
        wolves=1,
        hens=3,
        death=0.2,
        birth=0.3,
        alone=0.05,
        horizon=9,
        render_mode=None,
    ):
        self.death, self.birth, self.alone = death, birth, alone
        self.horizon, self.render_mode = horizon, render_mode
        names = [f"wolf_{i}" for i in range(wolves)] + [f"hen_{i}" for i in range(hens)]
        self.possible_agents = names
        self.agents = []
        self.seeds = []

    def observation_space(self, agent):
        return OBSERVATIONS[4 if agent.startswith("hen") else 5]

    def action_space(self, agent):
        return CHOICE if agent.startswith("hen") else BOX

    def reset(self, seed=None, options=None):
        self.rng, self.time = np.random.default_rng(seed), 0
        self.seeds.append(seed)
        coins = self.rng.random(len(self.possible_agents)) < 0.5
        coins[self.rng.integers(len(coins))] = True
        self.agents = [
            a for a, coin in zip(self.possible_agents, coins, strict=True) if coin
        ]
        self.last = dict.fromkeys(self.possible_agents, 0.0)
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        self.time += 1
        acted, self.count = self.agents, len(self.agents)
        self.last = {agent: float(np.sum(action)) for agent, action in actions.items()}
        draws = self.rng.random((2, len(self.possible_agents)))
        chance = dict(zip(self.possible_agents, draws.T, strict=True))
        over = self.time >= self.horizon
        terminated = {agent: bool(chance[agent][0] < self.death) for agent in acted}
        truncated = {
            agent: over
            or (bool(chance[agent][1] < self.alone) and not terminated[agent])
            for agent in acted
        }
        born = [
            agent
            for agent in self.possible_agents
            if agent not in acted and not over and chance[agent][0] < self.birth
        ]
        stay = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        # The order of names differs from possible_agents.
        self.agents = born + stay
        rewards = {agent: self.last[agent] + self.time / 8 for agent in acted}
        observers = [*acted, *born]
        infos = {agent: {} for agent in observers}
        return self._observe(observers), rewards, terminated, truncated, infos

    def render(self):
        image = np.zeros((20, 40, 3), np.uint8)
        image[:, : 2 * self.time] = 200
        return image

    def _observe(self, agents):
        return {
            agent: np.array(
                [
                    self.possible_agents.index(agent),
                    self.time,
                    self.last.get(agent, 0.0),
                    len(self.last),
                    7,
                ],
                np.float32,
            )[: self.observation_space(agent).shape[0]]
            for agent in agents
        }
