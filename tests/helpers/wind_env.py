"""A fast single-agent environment that can be made to fail."""

import os
import signal
from pathlib import Path

import torch
from gymnasium import spaces

from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.tokens import Tokens, TokenSpec

WINDY = (
    *("env=helpers.wind_env:WindEnv", "policy=feed_forward", "policy.hidden=[3]"),
    *("evolution.population=6", "repetitions=3", "total_generations=6"),
    *("validation.every=2", "validation.episodes=4", "checkpoint.every=2"),
    "threads=1",
)
"""Overrides for a short run of ``evolve``."""


class WindEnv(BatchedEnv):
    """Stay near 0 on a windy line; one token shows the position.

    ``fault`` happens in episode ``episode`` of environment 0: "raise", "poison" (NaN
    rewards), or "kill" of the process, ``kills`` times, counted by files in ``diary``.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        width: float = 1.0,
        fault: str | None = None,
        episode: int = 2,
        kills: int = 1,
        diary: str = ".",
        max_steps: int = 5,
        seed: int = 0,
        first_env: int = 0,
        first_episode: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            num_envs,
            max_steps=max_steps,
            seed=seed,
            first_env=first_env,
            first_episode=first_episode,
            device=device,
            dtype=dtype,
            dynamics_size=1,
        )
        self.width, self.fault, self.fault_episode = width, fault, episode
        self.kills, self.diary = kills, Path(diary)
        self.x = torch.zeros(num_envs, dtype=dtype)

    @property
    def groups(self):
        spec = TokenSpec(1, 2, ("x",), has_self=False)
        return {"agent": AgentGroup(1, spec, spaces.Box(-1.0, 1.0, (1,)))}

    def observe(self):
        place = self.x[:, None, None]
        features = torch.stack([place, torch.ones_like(place)], -1)
        types = torch.zeros(features.shape[:3], dtype=torch.int64)
        return {"agent": Tokens(features, types, torch.zeros_like(types).bool())}

    def place(self, rows, keys):
        self.x = self.x.index_copy(
            0, rows, self.width * (2 * self.sample_uniform(keys, 1)[:, 0] - 1)
        )

    def advance(self, actions):
        wind = self.dynamics.next()[:, 0] - 0.5
        self.x = self.x + 0.5 * actions["agent"][:, 0, 0] + 0.1 * wind
        rewards = -self.x.square()
        if ((self.env_ids == 0) & (self.episodes == self.fault_episode)).any():
            rewards = self._fail(rewards)
        ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return {"agent": rewards[:, None]}, ended

    def _fail(self, rewards):
        if self.fault == "raise":
            raise RuntimeError("a rock\nfell")
        if self.fault == "poison":
            return rewards * torch.nan
        if self.fault == "kill":
            num_kills = len(list(self.diary.glob("killed-*")))
            if num_kills < self.kills:
                (self.diary / f"killed-{num_kills}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return rewards

    def _tensors(self):
        return {"x": self.x}
