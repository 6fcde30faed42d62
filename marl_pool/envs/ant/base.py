"""Ants of two simulators: sensor channels as tokens, and pictures."""

from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.ant.drawing import NUM_PARTS, draw
from marl_pool.envs.base import AgentGroup, EnvOptions
from marl_pool.envs.simulation.env import SimulatedEnv, SimulatorStep, push_frames
from marl_pool.envs.simulation.simulator import Simulator
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.types import PositiveInt

JOINTS = [f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle")]


class AntOptions(EnvOptions, total=False):
    """Options that both ants pass on to `AntEnv`."""

    num_frames: PositiveInt
    channel_ids: bool
    max_steps: PositiveInt


class AntEnv(SimulatedEnv):
    """One ant in each environment, and one token for each channel of its sensors.

    A token consists of the last ``num_frames`` readings of its channel, the newest
    last. After a reset the first reading is repeated in place of earlier ones.

    Pictures are taken by a camera that moves with the ant. Attention is drawn as one
    bar for each channel; the line across the bars is the uniform weight.

    Args:
        build: builds a simulator, whose observations are the channels, then the
            positions of 13 parts.
        channels: names of the channels, in the order of the tokens.
        num_frames: readings of a channel in its token; they are the token's features,
            the newest last.
        channel_ids: give each channel a token type of its own.
    """

    state_names = (*SimulatedEnv.state_names, "frames")
    frames: Tensor
    """``(num_envs, num_frames, channels)`` readings, the newest last."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        build: Callable[[], Simulator[SimulatorStep]],
        channels: Sequence[str],
        num_frames: PositiveInt = 1,
        channel_ids: bool = False,
        max_steps: PositiveInt = 1000,
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
        return draw(
            self.parts[index].double().cpu().numpy(),
            weights=weights,
            size=size,
        )

    @override
    def _to_native(self, actions: Tensor) -> Tensor:
        return actions.to(torch.float32).clamp(-1, 1)

    @override
    def _update_frames(self, rows: Tensor, *, first: bool) -> None:
        newest = self.readings[rows]
        self.frames = push_frames(self.frames, rows, newest, first=first)
