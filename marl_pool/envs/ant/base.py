"""What the ants of two simulators have in common: channels as tokens, pictures."""

from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.ant.drawing import NUM_PARTS, draw
from marl_pool.envs.base import AgentGroup, EnvOptions
from marl_pool.envs.simulation.world import Batch, SimulatedEnv
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.types import PositiveInt

JOINTS = [f"{joint}_{leg}" for leg in (1, 2, 3, 4) for joint in ("hip", "ankle")]


class AntEnv(SimulatedEnv):
    """An ant for each world; each channel of its sensors is a token.

    Args:
        num_envs: worlds in the batch.
        simulators: they show the channels, then the positions of 13 parts.
        channels: what the sensors measure, in the order of the tokens.
        num_frames: readings of a token, the newest last, at least 1.
        channel_ids: each channel is a type of its own.
        **context: as `BatchedEnv` takes it.

    Raises:
        InputError: a number out of range.
    """

    frames: Tensor
    """``(num_envs, channels, num_frames)`` readings, the newest last."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        simulators: Batch,
        channels: Sequence[str],
        num_frames: PositiveInt,
        channel_ids: bool,
        max_steps: PositiveInt,
        **common: Unpack[EnvOptions],
    ) -> None:
        count = len(channels)
        super().__init__(
            num_envs,
            simulators=simulators,
            shape=(count + 3 * NUM_PARTS,),
            observed=common.get("dtype", torch.float32),
            max_steps=max_steps,
            **common,
        )
        self.channels, self.num_frames = tuple(channels), num_frames
        self._types = torch.arange(count, device=self.device) * channel_ids
        self.frames = self.observations.new_zeros(num_envs, count, num_frames)
        kinds = self.channels if channel_ids else ("channel",)
        spec = TokenSpec(
            count,
            num_frames,
            kinds,
            has_self=False,
            positions=(),
            num_frames=num_frames,
        )
        action = spaces.Box(-1, 1, (len(JOINTS),), np.float32)
        self._groups = {"agent": AgentGroup(1, spec, action)}

    @property
    def groups(self) -> dict[str, AgentGroup]:
        """One group, ``"agent"``, of one agent."""
        return self._groups

    @property
    def readings(self) -> Tensor:
        """The newest readings, ``(num_envs, channels)``."""
        return self.observations[:, : len(self.channels)]

    @property
    def parts(self) -> Tensor:
        """Where the torso and the legs' parts are, ``(num_envs, 13, 3)`` meters."""
        return self.observations[:, len(self.channels) :].unflatten(1, (NUM_PARTS, 3))

    def observe(self) -> dict[str, Tokens]:
        """Tokens ``(num_envs, 1, channels)``; see the class."""
        types = self._types.expand(self.num_envs, 1, -1).contiguous()
        padding = torch.zeros_like(types, dtype=torch.bool)
        return {"agent": Tokens(self.frames[:, None].clone(), types, padding)}

    def channel_names(self) -> list[str]:
        """What each token shows."""
        return list(self.channels)

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw world ``index`` with a camera that goes along; see `BatchedEnv.frame`.

        Attention is a bar for each channel; the line across is the fair share.
        """
        return draw(
            self.parts[index].double().cpu().numpy(),
            text=f"step {int(self.steps[index])}",
            num_tokens=len(self.channels),
            attention=attention,
            size=size,
        )

    def _native(self, actions: Tensor) -> Tensor:
        return actions.to(torch.float32).clamp(-1, 1)

    def _shown(self, rows: Tensor, fresh: bool) -> None:
        newest = self.readings[rows, :, None]
        if fresh:
            frames = newest.expand(-1, -1, self.num_frames)
        else:
            frames = torch.cat([self.frames[rows, :, 1:], newest], 2)
        self.frames = self.frames.index_copy(0, rows, frames)

    def _tensors(self) -> dict[str, Tensor]:
        return {**super()._tensors(), "frames": self.frames}
