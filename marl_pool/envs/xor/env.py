"""The XOR game, which shows the limit of an invariant policy that all agents share."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, BatchedEnv, EnvOptions
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE, Disc, Frame, Projection
from marl_pool.options.types import Episodes, Size
from marl_pool.tokens import Tokens, TokenSpec, self_first
from marl_pool.utils.errors import InputError

TYPE_NAMES = ("self", "agent")
TieBreaker = Literal["none", "rank", "random"]
EXTENT = 1.6
"""Half the side of the square that a frame shows."""


class XOR(BatchedEnv):
    r"""Agents see equal sets and get a reward if exactly one of them chooses 1.

    Each agent has a token with one number; an agent observes the tokens of all, itself
    first and the others in the order of agents. For two agents the reward of both
    is the exclusive or of their choices. Which of them chooses 1 does not matter, but
    they have to differ, and ``tie_breaker`` decides whether they can:

    - ``"none"``: all numbers are 0. All observations are equal, so all agents choose 1
      with the same probability p, and the expected reward of a step is
      :math:`N p (1 - p)^{N - 1}`. It is largest at p = 1 / N: 1/2 for two agents, 1/e
      for many. A deterministic policy that all agents share gets 0, whatever its
      pooling head.
    - ``"rank"``: the number of agent i is i / (N - 1).
    - ``"random"``: a number from U(0, 1), drawn anew in each step.

    With a tie-breaker a deterministic, permutation-invariant policy gets 1: it chooses
    1 if its own number is the largest of the set.

    Source: the XOR game of Fu et al., Revisiting some common practices in cooperative
    multi-agent reinforcement learning (2022), https://arxiv.org/abs/2206.07505, where
    it shows the limit of shared parameters. Differences: any number of agents, and
    steps are repeated without changing the state.

    Args:
        num_agents: N, at least 2.
        tie_breaker: what tells agents apart: none, rank or random.
    """

    state_names: ClassVar[tuple[str, ...]] = ("numbers", "choices")
    steps_past_end = shows_state = True

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_agents: Size = 2,
        tie_breaker: TieBreaker = "none",
        max_steps: Episodes = 16,
        **common: Unpack[EnvOptions],
    ) -> None:
        if num_agents < 2:
            raise InputError(f"env.num_agents: expected at least 2, got {num_agents}")
        size = num_agents if tie_breaker == "random" else 0
        super().__init__(num_envs, max_steps=max_steps, dynamics_size=size, **common)
        self.num_agents, self.tie_breaker = num_agents, tie_breaker
        spec = TokenSpec(num_agents, 1, TYPE_NAMES, signal_types=TYPE_NAMES)
        self.groups = {"agent": AgentGroup(num_agents, spec, spaces.Discrete(2))}
        numbers = torch.arange(num_agents, device=self.device)
        self._order = self_first(numbers, num_agents)
        ranks = np.linspace(0, 1, num_agents) * (tie_breaker == "rank")
        self._ranks = self._constant(ranks)
        self.numbers = self._ranks.repeat(num_envs, 1)
        self.choices = torch.zeros(
            num_envs, num_agents, dtype=torch.int64, device=self.device
        )

    @override
    def observe(self) -> dict[str, Tokens]:
        features = self.numbers[:, self._order][..., None]
        types = torch.ones_like(self._order)
        types[:, 0] = 0
        types = types.expand(features.shape[:-1])
        return {"agent": Tokens(features, types, torch.zeros_like(types).bool())}

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        numbers = self._ranks.expand(len(rows), -1)
        if self.tie_breaker == "random":
            numbers = self.sample_uniform(keys, self.num_agents)
        self.numbers = self.numbers.index_copy(0, rows, numbers)
        self.choices = self.choices.index_fill(0, rows, 0)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        self.choices = actions["agent"].clone()
        is_one = (self.choices.sum(1, keepdim=True) == 1).to(self.dtype)
        if self.tie_breaker == "random":
            self.numbers = self.dynamics.next()
        never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return {"agent": is_one.expand(-1, self.num_agents)}, never

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        # Agents stand on a circle; those that chose 1 are green.
        angles = 2 * np.pi * np.arange(self.num_agents) / self.num_agents
        places = np.stack((np.cos(angles), np.sin(angles)), 1)
        frame = Frame(Projection(EXTENT, size))
        if weights is not None:
            by_agent = np.zeros(self.num_agents)
            by_agent[self._order[agent].cpu().numpy()] = weights
            frame.attention(places, agent, by_agent)
        kinds = (Disc("chose 0", OBSTACLE, 0.12), Disc("chose 1", GREEN, 0.12))
        choices = self.choices[index].tolist()
        frame.discs([kinds[choice] for choice in choices], places, places)
        frame.legend(kinds)
        return frame.image
