"""Turn-based environments of PettingZoo."""

from typing import ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv


class RandomTurns(AECEnv):
    """Three agents in random order, with random rewards, deaths and masks.

    An agent that dies keeps its reward; after 12 turns all are truncated.

    Args:
        deaths: probability that some agent dies in a turn.
        masks: ``observation``, ``infos`` or None.
        fault: a rule to break in the third turn.
        parallel: value of ``is_parallelizable``.
    """

    possible_agents: ClassVar = ["p_0", "p_1", "p_2"]
    log: ClassVar[list] = []
    """For each turn: the agent, its action and all rewards; None starts an episode."""

    def __init__(
        self,
        deaths=0.1,
        masks="observation",
        fault=None,
        parallel=False,
        render_mode=None,
    ):
        self.deaths, self.masks, self.fault = deaths, masks, fault
        self.metadata = {"name": "random_turns", "is_parallelizable": parallel}
        self.render_mode = render_mode

    def observation_space(self, agent):
        space = spaces.Box(-1, 1, (4,), np.float32)
        if self.masks != "observation":
            return space
        return spaces.Dict(observation=space, action_mask=spaces.MultiBinary(4))

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.log.append(None)
        self._choose()

    def _choose(self):
        alive = [
            agent
            for agent in self.agents
            if not (self.terminations[agent] or self.truncations[agent])
        ]
        self.agent_selection = self.random.choice(alive or self.agents).item()
        self.mask = (self.random.random(4) < 0.5).astype(np.int8)
        self.mask[self.random.integers(4)] = 1
        if self.masks == "infos":
            self.infos[self.agent_selection] = {"action_mask": self.mask}
        if self.fault == "stranger" and self.time == 3:
            self.agent_selection = "ghost"
            return
        self._deads_step_first()

    def observe(self, agent):
        number = self.possible_agents.index(agent)
        features = np.float32([number / 2, self.time / 12, 0, 1])
        if self.masks != "observation":
            return features
        return {"observation": features, "action_mask": self.mask}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            if self.fault != "stays":
                self._was_dead_step(action)
            return
        if self.masks and not self.mask[action]:
            raise RuntimeError(f"{agent} took the illegal action {action}")
        self.time += 1
        self._cumulative_rewards[agent] = 0.0
        for name in self.agents:
            self.rewards[name] = float(self.random.normal())
        self.log.append((agent, int(action), dict(self.rewards)))
        if self.fault == "reward" and self.time == 3:
            self.rewards[agent] = None
            return
        self._accumulate_rewards()
        if self.time == 3 and self.fault in ("terminations", "agents"):
            setattr(self, self.fault, None)
            return
        if self.fault == "last" and self.time == 3:
            self._cumulative_rewards = dict.fromkeys(self.agents, 9.0)
        if self.random.random() < self.deaths:
            victim = self.random.choice(self.agents).item()
            flags = (
                self.terminations if self.random.random() < 0.5 else self.truncations
            )
            flags[victim] = True
        if self.time == 12:
            self.truncations = dict.fromkeys(self.agents, True)
        if self.fault == "stays" and self.time == 3:
            self.terminations[agent] = True
        self._choose()

    def last(self, observe=True):
        results = super().last(observe)
        return results[:4] if self.fault == "short" and self.time == 3 else results

    def render(self):
        return np.full((40, 40, 3), 20 * self.time, np.uint8)


class PassItOn(AECEnv):
    """A leader names a number, and a follower repeats it; each is paid a turn late.

    The leader sees a target, and is paid in the follower's turn. The follower sees what
    the leader chose, and is paid in the leader's next turn, or at the end: 1 for the
    right number, 0 otherwise. So the best sum of returns is 2 `ROUNDS`.
    """

    ROUNDS = 4
    NUMBERS = 3
    possible_agents: ClassVar = ["leader", "follower"]
    metadata: ClassVar = {"name": "pass_it_on"}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observation_space(self, agent):
        return spaces.Discrete(self.NUMBERS)

    def action_space(self, agent):
        return spaces.Discrete(self.NUMBERS)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.agents, self.turn = list(self.possible_agents), 0
        self.agent_selection, self.debt = "leader", 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.shown = self.random.integers(self.NUMBERS).item()

    def observe(self, agent):
        return self.shown

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.turn += 1
        partner = "follower" if agent == "leader" else "leader"
        # Pay what the partner earned by its last turn.
        self.rewards[partner], self.debt = self.debt, float(action == self.shown)
        self.shown = int(action)
        if agent == "follower":
            self.shown = self.random.integers(self.NUMBERS).item()
        if self.turn == 2 * self.ROUNDS:
            self.rewards[agent] += self.debt
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = partner
        self._deads_step_first()
