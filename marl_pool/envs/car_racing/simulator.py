"""Gymnasium's CarRacing-v3 as a `Simulator`; importing it needs Box2D and pygame."""

import math
from typing import Any

import numpy as np
import pygame
from gymnasium.envs.box2d import car_racing
from pygame import gfxdraw
from typing_extensions import override

from marl_pool.envs.simulation import Simulator, SimulatorStep

MARGIN = 2
"""Pixels beyond the window at which polygons are no longer drawn."""


class CarRacingSimulator(Simulator[SimulatorStep]):
    """One car on one track; an observation is ``(96, 96, 3)`` uint8 RGB.

    The arguments are options of `CarRacing`.
    """

    def __init__(
        self, *, smooth: bool, action_repeat: int, lap_complete_percent: float
    ) -> None:
        self._env = _FastCarRacing(smooth, lap_complete_percent)
        self._action_repeat = action_repeat

    @override
    def reset(self, seed: int) -> SimulatorStep:
        return SimulatorStep(self._env.reset(seed=seed)[0])

    @override
    def step(self, action: np.ndarray) -> SimulatorStep:
        total, terminated = 0.0, False
        for _ in range(self._action_repeat):
            picture, reward, terminated, _, _ = self._env.step(action)
            total += float(reward)
            if terminated:
                break
        return SimulatorStep(picture, total, bool(terminated))


class _FastCarRacing(car_racing.CarRacing):
    """CarRacing with the same pictures, drawn several times as fast.

    All polygons of the ground are rotated in one operation.
    """

    def __init__(self, smooth: bool, lap_complete_percent: float) -> None:
        super().__init__(lap_complete_percent=lap_complete_percent)
        self._smooth = smooth
        self._lawns = _lawns()
        self._rows = _middles(car_racing.WINDOW_H, car_racing.STATE_H)
        self._columns = _middles(car_racing.WINDOW_W, car_racing.STATE_W)

    @override
    def _create_track(self) -> bool:
        success: bool = super()._create_track()
        if success:
            road = np.array([corners for corners, _ in self.road_poly])
            self._corners = np.concatenate([self._lawns, road])
        return success

    @override
    def _render_road(self, zoom: float, translation: Any, angle: float) -> None:
        surface: Any = self.surf
        # Rotate, scale and shift all polygons at once.
        cos, sin = math.cos(angle), math.sin(angle)
        x, y = self._corners[..., 0], self._corners[..., 1]
        rotated = np.stack([cos * x - sin * y, sin * x + cos * y], 2)
        corners = rotated * zoom + np.array(tuple(translation))
        colors = [self.bg_color, *[self.grass_color] * (len(self._lawns) - 1)]
        # Read in each frame: a tile changes its color when a wheel touches it.
        colors += [color for _, color in self.road_poly]
        # Draw only the polygons in the window.
        window = np.array([car_racing.WINDOW_W, car_racing.WINDOW_H]) + MARGIN
        outside = (corners.max(1) < -MARGIN) | (corners.min(1) > window)
        for index in (~outside.any(1)).nonzero()[0]:
            polygon = corners[index].tolist()
            color = [int(part) for part in colors[index]]
            gfxdraw.aapolygon(surface, polygon, color)
            gfxdraw.filled_polygon(surface, polygon, color)

    @override
    def _create_image_array(self, screen: Any, size: Any) -> np.ndarray:
        if self._smooth:
            averaged: np.ndarray = super()._create_image_array(screen, size)
            return averaged
        pixels = pygame.surfarray.pixels3d(screen)
        return pixels[self._columns[:, None], self._rows].transpose(1, 0, 2)


def _middles(pixels: int, blocks: int) -> np.ndarray:
    """Return the middle pixel of each of ``blocks`` equal parts of a line."""
    return ((np.arange(blocks) + 0.5) * pixels / blocks).astype(int)


def _lawns() -> np.ndarray:
    """Return the corners of the field and of its lighter squares, ``(n, 4, 2)``."""
    reach, side = car_racing.PLAYFIELD, car_racing.GRASS_DIM
    field = reach * np.array([[(1, 1), (1, -1), (-1, -1), (-1, 1)]])
    starts = range(-20, 20, 2)
    origins = np.array([[(x, y)] for x in starts for y in starts])
    corners = np.array([(1, 0), (0, 0), (0, 1), (1, 1)])
    return np.concatenate([field, side * (origins + corners)])
