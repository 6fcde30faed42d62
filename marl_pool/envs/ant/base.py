"""Base of the two ant environments: sensor channels as tokens, and rendering."""

from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup, EnvOptions
from marl_pool.envs.drawing.canvas import (
    ATTENTION,
    FOCUS,
    GRID,
    INK,
    PAPER,
    Color,
    opencv,
)
from marl_pool.envs.simulation import (
    SimulatedEnv,
    Simulator,
    SimulatorStep,
    push_frames,
)
from marl_pool.options.types import Episodes, Repeats
from marl_pool.tokens import Tokens, TokenSpec

JOINTS = [f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle")]
NUM_PARTS = 13
"""The torso, and three parts of each of four legs."""
VIEW = 3.6
"""Width of the picture in meters."""
YAW, PITCH = np.deg2rad(-25), np.deg2rad(28)
"""Angles of the camera; at 0 and 0 it looks along +y. The ant runs along +x."""
HORIZON = 0.72
"""Row of the ground below the torso, as a fraction of the picture's height."""
TORSO, LIMB = 0.25, 0.08
"""Radii in meters."""
TILES: tuple[Color, Color] = (GRID, (214, 220, 212))
SHADOW: Color = (176, 184, 174)
BODY: Color = (196, 92, 40)
LEGS: tuple[Color, ...] = (
    (31, 90, 200),
    (74, 132, 224),
    (150, 60, 140),
    (190, 104, 178),
)
STRIP = 0.16
"""Height of the bars, as a fraction of the picture's height."""


class AntOptions(EnvOptions, total=False):
    """Options that both ants pass on to `AntEnv`."""

    num_frames: Repeats
    channel_ids: bool
    max_steps: Episodes


class AntEnv(SimulatedEnv):
    """One ant in each environment, with one token for each sensor channel.

    A token consists of the last ``num_frames`` readings of its channel, the newest
    last. After a reset the first reading is repeated in place of earlier ones.

    The camera of the pictures moves with the ant. Attention is drawn as one bar for
    each channel; the line across the bars is the uniform weight.

    Args:
        build: builds a simulator, whose observations are the channels, then the
            positions of 13 parts.
        channels: names of the channels, in the order of the tokens.
        num_frames: readings of a channel that are the features of its token, the newest
            last.
        channel_ids: give each channel a separate token type.
    """

    shows_state = has_token_order = True
    state_names = (*SimulatedEnv.state_names, "frames")
    frames: Tensor
    """``(num_envs, num_frames, channels)`` readings, the newest last."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        build: Callable[[], Simulator[SimulatorStep]],
        channels: Sequence[str],
        num_frames: Repeats = 1,
        channel_ids: bool = False,
        max_steps: Episodes = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        count = len(channels)
        super().__init__(
            num_envs,
            build=build,
            shape=(count + 3 * NUM_PARTS,),
            observation_dtype=common.get("dtype", torch.float32),
            max_steps=max_steps,
            **common,
        )
        # Each channel is a token, with its own type if `channel_ids` is set.
        self.channels, self.num_frames = tuple(channels), num_frames
        self._types = torch.arange(count, device=self.device) * channel_ids
        self.frames = self.observations.new_zeros(num_envs, num_frames, count)
        spec = TokenSpec(
            count,
            num_frames,
            self.channels if channel_ids else ("channel",),
            has_self=False,
            positions=(),
            num_frames=num_frames,
        )
        # One torque for each joint.
        action = spaces.Box(-1, 1, (len(JOINTS),), np.float32)
        self.groups = {"agent": AgentGroup(1, spec, action)}

    @property
    def readings(self) -> Tensor:
        """The newest readings, ``(num_envs, channels)``."""
        return self.observations[:, : len(self.channels)]

    @property
    def parts(self) -> Tensor:
        """Positions of the torso and the legs' parts, ``(num_envs, 13, 3)`` meters."""
        return self.observations[:, len(self.channels) :].unflatten(1, (NUM_PARTS, 3))

    @override
    def observe(self) -> dict[str, Tokens]:
        # Features are contiguous, token by token, with the newest reading last.
        types = self._types.expand(self.num_envs, 1, -1).contiguous()
        padding = torch.zeros_like(types, dtype=torch.bool)
        features = self.frames.mT[:, None].clone(memory_format=torch.contiguous_format)
        return {"agent": Tokens(features, types, padding)}

    def channel_names(self) -> list[str]:
        """Return the name of each token's channel."""
        return list(self.channels)

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        parts = self.parts[index].double().cpu().numpy()
        canvas = _AntCanvas(parts[0], size)
        canvas.ground()
        rods = [(parts[[0, 0]], TORSO, BODY)]
        for leg, color in zip(skeleton(parts), LEGS, strict=True):
            rods += [(leg[i : i + 2], LIMB, color) for i in range(3)]
        # Draw the shadows first: each rod projected onto the ground.
        for ends, radius, _ in rods:
            canvas.limb(ends * (1, 1, 0), radius, SHADOW)
        # Draw from far to near, so that near rods hide far ones.
        for rod in sorted(rods, key=lambda rod: -canvas.distance(rod[0].mean(0))):
            canvas.limb(*rod)
        if weights is not None:
            canvas.bars(weights)
        return canvas.image

    @override
    def _to_native(self, actions: Tensor) -> Tensor:
        return actions.to(torch.float32).clamp(-1, 1)

    @override
    def _update_frames(self, rows: Tensor, *, first: bool) -> None:
        newest = self.readings[rows]
        self.frames = push_frames(self.frames, rows, newest, first=first)


def skeleton(parts: np.ndarray) -> np.ndarray:
    """Compute the joints of the legs from the centers ``(13, 3)`` of their parts.

    The center c of a part is halfway between its ends, so the outer end is 2c minus the
    inner end.

    Returns:
        ``(4, 4, 3)`` points of each leg: torso, hip, ankle and tip.
    """
    joints = [np.repeat(parts[:1], 4, 0)]
    for middle in parts[1:].reshape(4, 3, 3).transpose(1, 0, 2):
        joints.append(2 * middle - joints[-1])
    return np.stack(joints, 1)


class _AntCanvas:
    """An image seen by a camera that moves with the ant."""

    def __init__(self, center: np.ndarray, size: int) -> None:
        self.cv2 = opencv()
        self.image = np.full((size, size, 3), PAPER, np.uint8)
        self._center = np.array([center[0], center[1], 0.0])
        self._scale = size / VIEW
        self._middle = np.array([0.5, HORIZON]) * size
        # Axes of the picture, and the direction away from the camera.
        across = (np.cos(YAW), np.sin(YAW), 0)
        away = (-np.sin(YAW) * np.cos(PITCH), np.cos(YAW) * np.cos(PITCH))
        self._away = np.array([*away, -np.sin(PITCH)])
        self._axes = np.stack([across, -np.cross(across, self._away)], 1)

    def points(self, points: np.ndarray) -> np.ndarray:
        """Project points ``(…, 3)`` in meters to pixels, ``(…, 2)`` int32."""
        projected = (points - self._center) @ self._axes * self._scale + self._middle
        # A diverging simulation exceeds OpenCV's 32-bit coordinates.
        return np.rint(np.clip(projected, -1e4, 1e4)).astype(np.int32)

    def distance(self, point: np.ndarray) -> float:
        """Compute the distance of a point from the camera, up to a constant."""
        return float((point - self._center) @ self._away)

    def ground(self) -> None:
        """Draw tiles of half a meter."""
        side, reach = 0.5, 12
        first = np.floor(self._center / side).astype(int) - (reach, reach, 0)
        corners = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)])
        for offset in np.ndindex(2 * reach, 2 * reach, 1):
            origin = first + np.array(offset)
            tile = self.points(side * (origin + corners))
            color = TILES[origin.sum() % 2]
            self.cv2.fillConvexPoly(self.image, tile, color, self.cv2.LINE_AA)

    def limb(self, ends: np.ndarray, radius: float, color: Color) -> None:
        """Draw a rod with round ends; equal ends make a ball."""
        first, last = self.points(ends).tolist()
        width = max(1, round(2 * radius * self._scale))
        self.cv2.line(self.image, first, last, color, width, self.cv2.LINE_AA)

    def bars(self, weights: np.ndarray) -> None:
        """Draw a bar for each token; the strip is `FOCUS` uniform weights high."""
        size = len(self.image)
        top, bottom = round((1 - STRIP) * size), size - 4
        self.image[top - 4 :] = PAPER
        slot = (size - 8) / len(weights)
        heights = (bottom - top) * np.clip(weights * len(weights) / FOCUS, 0, 1)
        for token, height in enumerate(heights):
            left_edge, right_edge = 4 + np.array([token + 0.1, token + 0.9]) * slot
            right_edge = max(right_edge, left_edge + 1)
            columns = slice(round(left_edge), round(right_edge))
            self.image[top:bottom, columns] = GRID
            self.image[bottom - round(height) : bottom, columns] = ATTENTION
        # Mark the height of the uniform weight.
        uniform = bottom - round((bottom - top) / FOCUS)
        self.image[uniform, 4:-4] = INK
