"""Gymnasium view of an environment with one agent."""

from typing import Any

import gymnasium
import numpy as np

from marl_pool.envs.views.pettingzoo import (
    FRAMES_PER_SECOND,
    RENDER_MODES,
    Observation,
    ParallelView,
)
from marl_pool.utils.errors import InputError


class OneAgentView(gymnasium.Env[Observation, Any]):
    """An environment with one agent behind Gymnasium's ``Env``.

    Seeds work as in `ParallelView`.

    Args:
        name: a registered environment, or ``package.module:Class``.
        render_mode: ``"rgb_array"`` or None.
        options: options of the environment's constructor.

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

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the next episode, or the first one of ``seed``."""
        super().reset(seed=seed)
        observations, infos = self.view.reset(seed=seed, options=options)
        return observations[self.agent], infos[self.agent]

    def step(
        self, action: Any
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Advance by one step."""
        parts = self.view.step({self.agent: action})
        observations, rewards, terminated, truncated, infos = parts
        agent = self.agent
        return (
            observations[agent],
            rewards[agent],
            terminated[agent],
            truncated[agent],
            infos[agent],
        )

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Render an image ``(height, width, 3)`` uint8."""
        return self.view.render()
