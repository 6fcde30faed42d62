"""A tiny PettingZoo environment with actions of any space, and action masks."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from marl_pool.policies.action_spaces import ActionRows

SPACES: dict[str, spaces.Space[Any]] = {
    "one": spaces.Discrete(4),
    "start": spaces.Discrete(3, start=-1),
    "several": spaces.MultiDiscrete([3, 2]),
    "grid": spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[5, 0], [0, -1]]),
    "bits": spaces.MultiBinary(3),
    "tuple": spaces.Tuple(
        (spaces.Box(-1, 2, (2,)), spaces.Discrete(3, start=1), spaces.MultiBinary(2))
    ),
    "dict": spaces.Dict(
        move=spaces.Box(0, 1, (1,), np.float64), say=spaces.MultiDiscrete([4, 2])
    ),
}


class JointEnv(ParallelEnv):
    """Two agents whose actions are checked; an illegal one raises an error.

    Args:
        kind: key of the action space in `SPACES`.
        masks: where the action masks are: "observation", "infos" or "tuple" (in the
            observation, a tuple of one mask for each choice); None for no masks.
        stuck_at: step in which no action is legal.
        start: first step with a mask.
        first: first episode with a mask.
        ignore: collect illegal actions in `illegal` instead of raising an error.
    """

    metadata: ClassVar = {"name": "joint_v0", "render_modes": ["rgb_array"]}
    possible_agents: ClassVar = ["a_0", "a_1"]
    illegal: ClassVar[list[Any]] = []

    def __init__(
        self,
        kind: str = "several",
        masks: str | None = None,
        stuck_at: int | None = None,
        start: int = 0,
        first: int = 0,
        ignore: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.space, self.masks, self.stuck_at = SPACES[kind], masks, stuck_at
        self.start, self.ignore, self.render_mode = start, ignore, render_mode
        self.rows, self.first, self.episode = ActionRows(self.space), first, -1

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        parts: dict[str, Any] = {"observation": spaces.Box(-1, 1, (3,), np.float32)}
        sizes = self.rows.sizes
        if self.masks == "observation":
            parts["action_mask"] = spaces.MultiBinary(sum(sizes))
        if self.masks == "tuple":
            parts["action_mask"] = spaces.Tuple(map(spaces.MultiBinary, sizes))
        return spaces.Dict(parts) if len(parts) > 1 else parts["observation"]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time = list(self.possible_agents), 0
        self.episode += 1
        self.random = np.random.default_rng(seed)
        return self._observe(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        rewards = {}
        for agent, action in actions.items():
            assert self.space.contains(action), action
            row = np.atleast_1d(self.rows.flatten(action))
            choices = row[: len(self.rows.sizes)].astype(int)
            legal = [
                mask[c] for mask, c in zip(self.legal[agent], choices, strict=True)
            ]
            if not all(legal):
                if not self.ignore:
                    raise RuntimeError(f"{agent} took the illegal action {action}")
                self.illegal.append(action)
            # The first choice has to be its last option.
            rewards[agent] = float(choices[0] == self.rows.sizes[0] - 1)
        self.time += 1
        agents, over = self.agents, {}
        for i, agent in enumerate(self.possible_agents):
            over[agent] = self.time >= 4 + i
        self.agents = [agent for agent in agents if not over[agent]]
        observations, infos = self._observe(agents)
        ended = {agent: over[agent] for agent in agents}
        return observations, rewards, ended, dict.fromkeys(agents, False), infos

    def _observe(self, agents: list[str]) -> Any:
        is_masked = self.time >= self.start and self.episode >= self.first
        self.legal: dict[str, list[np.ndarray]] = {}
        observations: dict[str, Any] = {}
        infos: dict[str, Any] = {}
        for agent in agents:
            masks = []
            for size in self.rows.sizes:
                mask = self.random.integers(2, size=size).astype(np.int8)
                mask[self.random.integers(size)] = 1
                if self.masks is None or not is_masked:
                    mask[:] = 1
                masks.append(mask * (self.time != self.stuck_at))
            self.legal[agent] = masks
            features = self.random.uniform(-1, 1, 3).astype(np.float32)
            observations[agent], infos[agent] = features, {}
            if self.masks == "infos" and is_masked:
                infos[agent] = {"action_mask": np.concatenate(masks)}
            if self.masks == "observation":
                joined = np.concatenate(masks)
                observations[agent] = {"observation": features, "action_mask": joined}
            if self.masks == "tuple":
                observation = {"observation": features, "action_mask": tuple(masks)}
                observations[agent] = observation
        return observations, infos

    def render(self) -> np.ndarray:
        return np.full((8, 8, 3), 90, np.uint8)
