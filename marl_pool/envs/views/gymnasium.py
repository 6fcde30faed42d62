"""Gymnasium view of an environment with one agent."""

from typing import Any

import gymnasium
import numpy as np
from typing_extensions import override

from marl_pool.envs.views.pettingzoo import (
    FRAMES_PER_SECOND,
    RENDER_MODES,
    Observation,
    ParallelView,
)
from marl_pool.utils.errors import InputError


class OneAgentView(gymnasium.Env[Observation, Any]):
    """An environment with one agent behind Gymnasium's ``Env``; see `ParallelView`.

    Raises:
        InputError: as for `ParallelView`, or an environment of several agents.
    """

    metadata = {  # noqa: RUF012, the base class declares it so
        "render_modes": list(RENDER_MODES),
        "render_fps": FRAMES_PER_SECOND,
    }

    def __init__(
        self, name: str, *, render_mode: str | None = None, **options: Any
    ) -> None:
        self.view = ParallelView(name, render_mode=render_mode, **options)
        self.render_mode = render_mode
        agents = self.view.possible_agents
        if len(agents) != 1:
            raise InputError(
                f"env {name!r}: a Gymnasium view expects one agent, got {len(agents)}; "
                "make_env gives all of them"
            )
        self.agent = agents[0]
        self.observation_space = self.view.observation_space(self.agent)
        self.action_space = self.view.action_space(self.agent)

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        observations, infos = self.view.reset(seed=seed, options=options)
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
