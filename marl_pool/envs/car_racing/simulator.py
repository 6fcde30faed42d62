"""Gymnasium's CarRacing-v3 as a `Simulator`; imported where Box2D and pygame are."""

import math
from typing import Any

import numpy as np
import pygame
from gymnasium.envs.box2d import car_racing
from pygame import gfxdraw

from marl_pool.envs.simulation.simulator import Simulator

MARGIN = 2
"""Pixels; what is farther off the picture is not drawn."""


class CarRacingSimulator(Simulator):
    """One car on one track; an observation is ``(96, 96, 3)`` uint8 RGB.

    Args:
        smooth: shrink the picture as Gymnasium does, by averaging; or take the pixel
            in the middle of each.
        action_repeat: frames that an action lasts; their rewards are summed.
        lap_complete_percent: of Gymnasium's env.
    """

    def __init__(
        self, *, smooth: bool, action_repeat: int, lap_complete_percent: float
    ) -> None:
        self._env = _Racing(smooth, lap_complete_percent)
        self._action_repeat = action_repeat

    def reset(self, seed: int) -> np.ndarray:
        """See `Simulator.reset`."""
        picture: np.ndarray = self._env.reset(seed=seed)[0]
        return picture

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """Step by ``(steer, gas, brake)``; see `Simulator.step`."""
        total, over = 0.0, False
        for _ in range(self._action_repeat):
            picture, reward, over, _, _ = self._env.step(action)
            total += float(reward)
            if over:
                break
        return picture, total, bool(over)


class _Racing(car_racing.CarRacing):
    """The env; it turns all of the ground at once, which draws it much faster."""

    def __init__(self, smooth: bool, lap_complete_percent: float) -> None:
        super().__init__(lap_complete_percent=lap_complete_percent)
        self._smooth = smooth
        self._lawns = _lawns()
        height, width = car_racing.WINDOW_H, car_racing.WINDOW_W
        self._rows = _middles(height, car_racing.STATE_H)
        self._columns = _middles(width, car_racing.STATE_W)

    def _create_track(self) -> bool:
        found: bool = super()._create_track()
        if found:
            road = np.array([corners for corners, _ in self.road_poly])
            self._corners = np.concatenate([self._lawns, road])
        return found

    def _render_road(self, zoom: float, translation: Any, angle: float) -> None:
        surface: Any = self.surf
        cos, sin = math.cos(angle), math.sin(angle)
        x, y = self._corners[..., 0], self._corners[..., 1]
        turned = np.stack([cos * x - sin * y, sin * x + cos * y], 2)
        shown = turned * zoom + np.array(tuple(translation))
        field, lawns = self.bg_color, self.grass_color
        colors = [field, *[lawns] * (len(self._lawns) - 1)]
        # Read anew each time: a tile changes its color when a wheel comes upon it.
        colors += [color for _, color in self.road_poly]
        window = np.array([car_racing.WINDOW_W, car_racing.WINDOW_H]) + MARGIN
        outside = (shown.max(1) < -MARGIN) | (shown.min(1) > window)
        for index in (~outside.any(1)).nonzero()[0]:
            corners = shown[index].tolist()
            color = [int(part) for part in colors[index]]
            gfxdraw.aapolygon(surface, corners, color)
            gfxdraw.filled_polygon(surface, corners, color)

    def _create_image_array(self, screen: Any, size: Any) -> np.ndarray:
        if self._smooth:
            smooth: np.ndarray = super()._create_image_array(screen, size)
            return smooth
        pixels = pygame.surfarray.pixels3d(screen)
        return pixels[self._columns[:, None], self._rows].transpose(1, 0, 2)


def _middles(pixels: int, blocks: int) -> np.ndarray:
    """The middle pixel of each of ``blocks`` equal parts of a line."""
    return ((np.arange(blocks) + 0.5) * pixels / blocks).astype(int)


def _lawns() -> np.ndarray:
    """The corners of the whole field and of its lighter squares, ``(n, 4, 2)``."""
    reach, side = car_racing.PLAYFIELD, car_racing.GRASS_DIM
    field = reach * np.array([[(1, 1), (1, -1), (-1, -1), (-1, 1)]])
    starts = range(-20, 20, 2)
    origins = np.array([[(x, y)] for x in starts for y in starts])
    corners = np.array([(1, 0), (0, 0), (0, 1), (1, 1)])
    return np.concatenate([field, side * (origins + corners)])
