"""CarRacing as a set of patches that do not say where on the screen they are."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor

from marl_pool.envs.base import AgentGroup, EnvOptions
from marl_pool.envs.car_racing.backgrounds import SIDE, find_background, replace_grass
from marl_pool.envs.drawing.patches import PatchGrid, draw
from marl_pool.envs.simulation.simulator import Simulators, extra
from marl_pool.envs.simulation.world import SimulatedEnv
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.types import NonNegativeInt, PositiveInt, UnitInterval

COLORS = {"grey": 1, "rgb": 3}
"""Numbers to a pixel."""
LUMINANCE = (9798, 19235, 3735)
"""Shares of red, green and blue in grey, in units of 2^-15, as OpenCV has them."""


class CarRacing(SimulatedEnv):
    """Drive around a random track, seeing the screen as loose patches.

    The screen is Gymnasium's, 96 × 96 pixels from above, always with the car below
    the middle and pointing up. What a policy sees is made of it in this order:

    1. The picture of 1000 × 800 pixels is shrunk by taking the pixel in the middle of
       each block, or with ``smooth`` by averaging.
    2. A ``background`` takes the place of the grass.
    3. Colors become grey, 0.299 red + 0.587 green + 0.114 blue, rounded.
    4. ``zero_rows_bottom`` rows, where the instruments are, become black.
    5. The last ``num_frames`` screens are kept. After a reset the first one stands
       for those before it.
    6. They are cut into patches, in rows from the upper left. A token's features are
       frame-major: all pixels of the oldest frame, row by row and with a pixel's
       colors side by side, then those of the next one; the newest comes last.

    With the defaults these are 256 tokens of 4 × 36 bytes, what AttentionNeuron sees.
    AttentionAgent, the baseline, sees 529 overlapping patches of 7 × 7 pixels in
    color: ``patch=7 stride=4 num_frames=1 color=rgb zero_rows_bottom=0``. The features
    are bytes; the embedding divides them by 255.

    All tokens are of one type, none is the agent itself, and none carries its place.
    Their order never changes here: a permutation (``perturbation=shuffle``) and
    missing patches (``occlude``) are perturbations. Orders that change within an
    episode are the paper's test with ``perturbation.scope=frame``.

    An action is three numbers in [-1, 1]: the steering, -1 for full left, and the gas
    and the brake, -1 for none and 1 for full. The reward is 1000 / tiles for each new
    tile of the track less 0.1 a frame. An episode ends (terminated) with the lap, or
    with -100 if the car leaves the field, and is truncated after ``max_steps``.

    The published agents were trained and tested on CarRacing-v0, whose screen is drawn
    without averaging (as here by default), and whose lap ends when all tiles are
    visited (``lap_complete_percent=1``); here, on v3, it ends at the start line, when
    95 % are. Tracks of the same seed differ too.

    A simulator steps in some milliseconds, one after the other. It cannot save its
    state; see `SimulatedEnv` for what that costs.

    Source: CarRacing (Klimov, 2016) through Gymnasium; Tang and Ha, The sensory neuron
    as a transformer (2021), section 4.4, and its published code. There four pictures
    take the place of the grass, exactly where it is not mixed with the road; here
    mixtures become mixtures of picture and road, and the pictures are others.

    Args:
        num_envs: cars in the batch, each on a track of its own.
        patch: height and width of a patch in pixels, 1 to 96.
        stride: pixels from a patch to the next one, 1 to 96.
        num_frames: screens of a token, at least 1.
        color: ``"grey"`` or ``"rgb"``.
        zero_rows_bottom: rows of pixels at the bottom that are black, 0 to 96; the
            instruments take 12.
        smooth: shrink the picture by averaging, as v3 does.
        background: ``"checkers"``, ``"clouds"``, ``"stripes"``, ``"sunset"`` or the
            file of a picture of your own, scaled to 96 × 96 pixels; ``"none"`` leaves
            the grass.
        action_repeat: frames that an action lasts, at least 1.
        no_reward_limit: the episode ends after more than so many steps in a row
            with negative rewards; 0 for never. The published search has 20, its tests
            none: ``experiment=car_racing_attention_neuron`` sets it in ``fitness_env``.
        lap_complete_percent: share of the tiles after which the start line ends the
            lap, 0 to 1.
        max_steps: steps until truncation.

    Raises:
        InputError: a number out of range, an unknown choice, or no such picture.
        ModuleNotFoundError: Box2D or pygame, of the extra ``box2d``, is missing.
    """

    screens: Tensor
    """``(num_envs, num_frames, 96, 96, colors)`` uint8, the newest last."""
    unrewarded: Tensor
    """``(num_envs,)`` int64: steps in a row, up to now, with negative rewards."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        patch: Annotated[int, Field(ge=1, le=SIDE)] = 6,
        stride: Annotated[int, Field(ge=1, le=SIDE)] = 6,
        num_frames: PositiveInt = 4,
        color: Literal["grey", "rgb"] = "grey",
        zero_rows_bottom: Annotated[int, Field(ge=0, le=SIDE)] = 12,
        smooth: bool = False,
        background: str = "none",
        action_repeat: PositiveInt = 1,
        no_reward_limit: NonNegativeInt = 0,
        lap_complete_percent: UnitInterval = 0.95,
        max_steps: PositiveInt = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(
            num_envs,
            simulators=_simulators(
                smooth=smooth,
                action_repeat=action_repeat,
                lap_complete_percent=lap_complete_percent,
            ),
            shape=(SIDE, SIDE, 3),
            observed=torch.uint8,
            max_steps=max_steps,
            **common,
        )
        self.patch, self.stride, self.num_frames = patch, stride, num_frames
        self.color, self.zero_rows_bottom = color, zero_rows_bottom
        self.patch_grid = PatchGrid(SIDE, patch, stride)
        self.no_reward_limit = no_reward_limit
        self._background = find_background(background)
        self._luminance = torch.tensor(LUMINANCE, device=self.device)
        shape = (num_envs, num_frames, SIDE, SIDE, COLORS[color])
        self.screens = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.unrewarded = torch.zeros_like(self.env_ids)
        self._groups = {"agent": self._describe()}

    @property
    def groups(self) -> dict[str, AgentGroup]:
        """One group, ``"agent"``, of one agent."""
        return self._groups

    def observe(self) -> dict[str, Tokens]:
        """Tokens ``(num_envs, 1, N)`` of bytes; see the class."""
        windows = self.screens.unfold(2, self.patch, self.stride)
        windows = windows.unfold(3, self.patch, self.stride)
        # From (E, frames, down, across, colors, y, x) to a row for each patch.
        patches = windows.permute(0, 2, 3, 1, 5, 6, 4)
        spec = self._groups["agent"].tokens
        features = patches.reshape(self.num_envs, 1, spec.num_tokens, -1)
        types = torch.zeros(features.shape[:3], dtype=torch.int64, device=self.device)
        return {"agent": Tokens(features, types, types.bool())}

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw world ``index`` in color, with its background; see `BatchedEnv.frame`.

        Attention tints the patches.
        """
        (picture,) = self._colored(self.observations[index : index + 1])
        return draw(
            picture.cpu().numpy(),
            attention,
            patch=self.patch,
            stride=self.stride,
            size=size,
        )

    def _native(self, actions: Tensor) -> Tensor:
        chosen = actions.to(torch.float32).clamp(-1, 1)
        return torch.cat([chosen[:, :1], (chosen[:, 1:] + 1) / 2], 1)

    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        rewards, over = super()._advance(actions)
        negative = rewards["agent"][:, 0] < 0
        self.unrewarded = (self.unrewarded + 1) * negative
        if self.no_reward_limit:
            over = over | (self.unrewarded > self.no_reward_limit)
            self.over = over
        return rewards, over

    def _shown(self, rows: Tensor, fresh: bool) -> None:
        newest = self._screen(self.observations[rows])[:, None]
        if fresh:
            frames = newest.expand(-1, self.num_frames, -1, -1, -1)
            self.unrewarded = self.unrewarded.index_fill(0, rows, 0)
        else:
            frames = torch.cat([self.screens[rows, 1:], newest], 1)
        self.screens = self.screens.index_copy(0, rows, frames)

    def _screen(self, pictures: Tensor) -> Tensor:
        """Steps 2 to 4 of the class: ``(n, 96, 96, colors)``."""
        screens = self._colored(pictures)
        if self.color == "grey":
            sums = (screens.int() * self._luminance).sum(-1, keepdim=True)
            screens = ((sums + (1 << 14)) >> 15).byte()
        if self.zero_rows_bottom:
            screens[:, -self.zero_rows_bottom :] = 0
        return screens

    def _colored(self, pictures: Tensor) -> Tensor:
        """The pictures with the background, as a tensor of one's own."""
        if self._background is None:
            return pictures.clone()
        changed = replace_grass(pictures.cpu().numpy(), self._background)
        return torch.from_numpy(changed).to(self.device)

    def _tensors(self) -> dict[str, Tensor]:
        own = {"screens": self.screens, "unrewarded": self.unrewarded}
        return {**super()._tensors(), **own}

    def _describe(self) -> AgentGroup:
        side = (SIDE - self.patch) // self.stride + 1
        features = self.num_frames * self.patch**2 * COLORS[self.color]
        spec = TokenSpec(
            side**2,
            features,
            ("patch",),
            has_self=False,
            dtype="uint8",
            num_frames=self.num_frames,
        )
        return AgentGroup(1, spec, spaces.Box(-1, 1, (3,), np.float32))


def _simulators(**options: Any) -> Simulators:
    # Nothing is shown on a screen, and pygame is not to greet.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with extra("box2d"):
        import Box2D  # noqa: F401  what is missing is to be missed by its own name
        import pygame  # noqa: F401

        from marl_pool.envs.car_racing.simulator import CarRacingSimulator
    return Simulators(lambda: CarRacingSimulator(**options))
