"""CarRacing as a set of screen patches without positions."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, Unpack
from warnings import catch_warnings

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, EnvOptions
from marl_pool.envs.car_racing.backgrounds import SIDE, find_background, replace_grass
from marl_pool.envs.patches import PatchGrid, draw, patch_spec, patch_tokens
from marl_pool.envs.simulation import SimulatedEnv, push_frames
from marl_pool.options.types import (
    Episodes,
    NonNegativeInt,
    PositiveInt,
    Repeats,
    UnitInterval,
)
from marl_pool.tokens import Tokens

COLORS = {"grey": 1, "rgb": 3}
"""Numbers per pixel."""
LUMINANCE = (9798, 19235, 3735)
"""Weights of red, green and blue in grey, in units of 2^-15, as in OpenCV."""


class CarRacing(SimulatedEnv):
    """Drive around a random track, observing the screen as a set of patches.

    The screen is Gymnasium's, 96 × 96 pixels from above, with the car always below the
    middle and pointing up. Observations are computed in these steps:

    1. The picture of 1000 × 800 pixels is shrunk by taking the middle pixel of each
       block, or with ``smooth`` by averaging.
    2. The grass is replaced by the ``background``.
    3. Colors become grey, 0.299 red + 0.587 green + 0.114 blue, rounded.
    4. ``zero_rows_bottom`` rows, which contain the instruments, become black.
    5. The last ``num_frames`` screens are stacked. After a reset the first one is
       repeated in place of earlier ones.
    6. They are cut into patches, by rows from the upper left. A token's features are
       frame-major: all pixels of the oldest frame, row by row and with a pixel's
       colors side by side, then the next frame; the newest comes last.

    With the defaults these are 256 tokens of 4 × 36 bytes, as in AttentionNeuron.
    AttentionAgent, the baseline, observes 529 overlapping patches of 7 × 7 pixels in
    color: ``patch=7 stride=4 num_frames=1 color=rgb zero_rows_bottom=0``. The features
    are bytes; the embedding divides them by 255.

    All tokens have the same type, none represents the agent, and none contains its
    position on the screen. Their order is fixed: permutations
    (``perturbation=shuffle``; within an episode, as in the paper's test,
    ``perturbation.scope=frame``) and missing patches (``occlude``) are perturbations.

    An action is three numbers in [-1, 1]: the steering, -1 for full left, and the gas
    and the brake, -1 for none and 1 for full. The reward is 1000 / tiles for each new
    tile of the track minus 0.1 per frame. An episode ends (terminated) with the lap, or
    with a reward of -100 if the car leaves the field.

    Simulators step one after another, at some milliseconds each. They cannot save
    their state; see `SimulatedEnv`.

    Source: `CarRacing <https://gymnasium.farama.org/environments/box2d/car_racing>`_
    (Klimov, 2016) through Gymnasium, as in section 4.4 of `Tang and Ha, 2021
    <https://arxiv.org/abs/2109.02869>`_. The published agents were trained and tested
    on CarRacing-v0. Its screen is shrunk without averaging, as here by default; its lap
    ends when all tiles are visited (``lap_complete_percent=1``), on v3 at the start
    line after 95 % of them; its tracks of the same seed differ. In the published code
    four other pictures replace the grass, and mixtures of grass and road stay.

    Args:
        patch: height and width of a patch in pixels.
        stride: distance of neighboring patches in pixels.
        num_frames: frames in a token.
        color: colors of a pixel.
        zero_rows_bottom: rows of pixels at the bottom that are made black; the
            instruments take 12.
        smooth: shrink the picture by averaging, as v3 does.
        background: ``"checkers"``, ``"clouds"``, ``"stripes"``, ``"sunset"`` or an
            image file, which is scaled to 96 × 96 pixels; ``"none"`` keeps the grass.
        action_repeat: frames for which an action is repeated.
        no_reward_limit: the episode terminates after more than this many consecutive
            steps with negative rewards; 0 for no limit. The published search uses 20,
            its tests none: ``experiment=car_racing_attention_neuron`` sets it in
            ``fitness_env``.
        lap_complete_percent: share of the tiles that must be visited before the start
            line ends the lap.

    Raises:
        InputError: an unreadable background.
        ModuleNotFoundError: Box2D or pygame, of the extra ``box2d``, is missing.
    """

    shows_state = has_token_order = True
    state_names = (*SimulatedEnv.state_names, "screens", "unrewarded")
    patch_grid: PatchGrid
    screens: Tensor
    """``(num_envs, num_frames, 96, 96, colors)`` uint8, the newest last."""
    unrewarded: Tensor
    """``(num_envs,)`` int64: latest consecutive steps with negative rewards."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        patch: Annotated[int, Field(ge=1, le=SIDE)] = 6,
        stride: Annotated[int, Field(ge=1, le=SIDE)] = 6,
        num_frames: Repeats = 4,
        color: Literal["grey", "rgb"] = "grey",
        zero_rows_bottom: Annotated[int, Field(ge=0, le=SIDE)] = 12,
        smooth: bool = False,
        background: str = "none",
        action_repeat: PositiveInt = 1,
        no_reward_limit: NonNegativeInt = 0,
        lap_complete_percent: UnitInterval = 0.95,
        max_steps: Episodes = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        # Render off screen, and suppress pygame's greeting.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        # SWIG modules warn, and crash the process if warnings are errors.
        with catch_warnings(action="ignore"):
            import Box2D  # noqa: F401  so that the error names the missing module
            import pygame  # noqa: F401

            from marl_pool.envs.car_racing.simulator import CarRacingSimulator
        super().__init__(
            num_envs,
            build=partial(
                CarRacingSimulator,
                smooth=smooth,
                action_repeat=action_repeat,
                lap_complete_percent=lap_complete_percent,
            ),
            shape=(SIDE, SIDE, 3),
            observation_dtype=torch.uint8,
            max_steps=max_steps,
            **common,
        )
        self.num_frames, self.no_reward_limit = num_frames, no_reward_limit
        self.color, self.zero_rows_bottom = color, zero_rows_bottom
        self.patch_grid = PatchGrid(SIDE, patch, stride)
        self._background = find_background(background)
        self._luminance = torch.tensor(LUMINANCE, device=self.device)
        shape = (num_envs, num_frames, SIDE, SIDE, COLORS[color])
        self.screens = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.unrewarded = torch.zeros_like(self.env_ids)
        # Each patch is a token with the patch's pixels of all frames.
        spec = patch_spec(self.patch_grid, num_frames, COLORS[color])
        action = spaces.Box(-1, 1, (3,), np.float32)
        self.groups = {"agent": AgentGroup(1, spec, action)}

    @override
    def observe(self) -> dict[str, Tokens]:
        return {"agent": patch_tokens(self.screens, self.patch_grid)}

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        (picture,) = self._replace_grass(self.observations[index : index + 1])
        return draw(picture.cpu().numpy(), weights, self.patch_grid, size)

    @override
    def _to_native(self, actions: Tensor) -> Tensor:
        clipped = actions.to(torch.float32).clamp(-1, 1)
        return torch.cat([clipped[:, :1], (clipped[:, 1:] + 1) / 2], 1)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        rewards, over = super().advance(actions)
        negative = rewards["agent"][:, 0] < 0
        self.unrewarded = (self.unrewarded + 1) * negative
        if self.no_reward_limit:
            over = over | (self.unrewarded > self.no_reward_limit)
            self.over = over
        return rewards, over

    @override
    def _update_frames(self, rows: Tensor, *, first: bool) -> None:
        newest = self._to_screens(self.observations[rows])
        self.screens = push_frames(self.screens, rows, newest, first=first)
        if first:
            self.unrewarded = self.unrewarded.index_fill(0, rows, 0)

    def _to_screens(self, pictures: Tensor) -> Tensor:
        """Apply steps 2 to 4 of the class; return ``(n, 96, 96, colors)``."""
        screens = self._replace_grass(pictures)
        if self.color == "grey":
            sums = (screens.int() * self._luminance).sum(-1, keepdim=True)
            screens = ((sums + (1 << 14)) >> 15).byte()
        if self.zero_rows_bottom:
            screens[:, -self.zero_rows_bottom :] = 0
        return screens

    def _replace_grass(self, pictures: Tensor) -> Tensor:
        """Return a copy of pictures with the background."""
        if self._background is None:
            return pictures.clone()
        changed = replace_grass(pictures.cpu().numpy(), self._background)
        return torch.from_numpy(changed).to(self.device)
