"""Simple centroid: stay at the centre of the signal entities, among distractors."""

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from marl_pool.envs.base import AgentGroup, EnvOptions
from marl_pool.envs.options import entity_counts
from marl_pool.envs.particles.actions import Steering
from marl_pool.envs.particles.physics import POSITION, Entities, ParticleEnv
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.types import (
    Counts,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

TYPE_NAMES = ("self", "agent", "signal", "noise")
SIGNAL_TYPES = ("self", "signal")
"""What decides an agent's reward; where the other agents are does not."""
FEATURE_SCALE = 5.0
"""What relative positions and velocities are divided by."""
AGENT_ACCELERATION = 5.0
SIGNAL_ACCELERATION = 1.0
START_SPEED = 2.0
"""Largest speed along an axis at the start."""


class SimpleCentroid(ParticleEnv):
    r"""Agents that are to stay at the centroid of signal entities that wander.

    Each agent sees every entity as a token: position and velocity relative to its
    own, divided by 5, and its type. Tokens stand in the order self, noise, other
    agents, signal. After the step an agent's reward is

    .. math:: r = -c \sqrt{\lVert p_{agent} - \bar p_{signal} \rVert_2}

    so noise entities, which never move, are to be ignored. Signal entities take a
    push of constant strength in a fresh uniform direction each step. Nothing
    collides, there are no walls, and an episode ends by truncation only.

    Agents and signals start uniformly in the square of half side ``spread``, with
    velocities uniform in [-2, 2] along each axis. Noise is uniform in the same square
    moved by one offset common to all, of uniform direction and of length uniform in
    [0, ``noise_offset``].

    Source: AdaPool, section 4.3.1 and appendix C.4, and the paper's published env. It
    differs from the latter in this: a seed fixes everything (there, spawns ignored
    it); with several agents each gets its own step's reward and observation (there,
    all but the first got them a step late) and is truncated with the world.

    Args:
        num_envs: worlds in the batch.
        counts: agents, signal and noise entities, as the paper labels its worlds.
        num_agents: learning agents, at least 1; None: as in ``counts``.
        num_signal: signal entities, at least 1; None: as in ``counts``.
        num_noise: noise entities, at least 0; None: as in ``counts``.
        continuous_actions: five numbers in [0, 1], of which the second to fifth push
            left, right, down and up, or one of five choices: no-op and the same.
        reward_scale: c, positive.
        noise_offset: largest length of the noise entities' common offset, at least 0.
        spread: half side of the starting square; None for
            ``max(log4(number of entities), 2)``.
        max_steps: steps until truncation.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        counts: Counts = "1-3-28",
        num_agents: PositiveInt | None = None,
        num_signal: PositiveInt | None = None,
        num_noise: NonNegativeInt | None = None,
        continuous_actions: bool = True,
        reward_scale: PositiveFloat = 0.01,
        noise_offset: NonNegativeFloat = 1.0,
        spread: PositiveFloat | None = None,
        max_steps: PositiveInt = 128,
        **common: Unpack[EnvOptions],
    ) -> None:
        num_agents, num_signal, num_noise = entity_counts(
            counts,
            {
                "num_agents": num_agents,
                "num_signal": num_signal,
                "num_noise": num_noise,
            },
            least=(1, 1, 0),
        )
        if spread is None:
            spread = max(math.log(num_agents + num_signal + num_noise, 4), 2.0)
        self.num_agents, self.num_signal = num_agents, num_signal
        self.num_noise = num_noise
        self.reward_scale, self.noise_offset = reward_scale, noise_offset
        self.spread, self.continuous_actions = spread, continuous_actions
        device = common.get("device", "cpu")
        dtype = common.get("dtype", torch.float32)
        self._steering = Steering(AGENT_ACCELERATION, continuous_actions, device, dtype)
        self._order = _token_order(num_agents, num_signal, num_noise).to(device)
        self._types = _token_types(num_agents, num_signal, num_noise).to(device)
        self._groups = {"agent": self._describe()}
        super().__init__(
            num_envs,
            entities=(
                Entities("agent", num_agents, (44, 160, 44), 0.075, max_speed=5.0),
                Entities("signal", num_signal, (31, 90, 200), max_speed=2.0),
                Entities("noise", num_noise, (214, 39, 40), movable=False),
            ),
            extent=spread + max(noise_offset, 1.0) + 0.25,
            max_steps=max_steps,
            **common,
            dynamics_size=num_signal,
        )
        # sin of the second is the cosine.
        self._phases = self._constant([0.0, math.pi / 2])

    @property
    def groups(self) -> dict[str, AgentGroup]:
        """One group, ``"agent"``."""
        return self._groups

    def observe(self) -> dict[str, Tokens]:
        """Tokens ``(num_envs, agents, N)``; see the class.

        Types and padding are the same tensors at every call: don't write to them.
        """
        shape = (self.num_envs, self.num_agents, -1, 4)
        # Flat, since index_select is several times faster than advanced indexing.
        features = self.state.index_select(1, self._order.flatten()).view(shape)
        features.sub_(self.state[:, : self.num_agents, None]).div_(FEATURE_SCALE)
        return {"agent": Tokens(features, self._batch_types, self._batch_padding)}

    def token_entities(self, group: str) -> Tensor:
        """``(agents, N)`` places in the state; the first is the agent itself."""
        return self._order

    def centroid(self) -> Tensor:
        """Where the signal's centre is, ``(num_envs, 2)``."""
        return self._signal_position.mean(1)

    def goals(self) -> Tensor:
        """The centroid, ``(num_envs, 1, 2)``."""
        return self.centroid()[:, None]

    def _place(self, rows: Tensor, keys: Tensor) -> None:
        moving = self.num_movable
        drawn = self.sample_uniform(keys, 4 * moving + 2 + 2 * self.num_noise)
        parts = [4 * moving, 2, 2 * self.num_noise]
        start, offset, noise = torch.split(drawn, parts, 1)
        scale = self._constant([self.spread, self.spread, START_SPEED, START_SPEED])
        self.state[rows, :moving] = (2 * start.view(len(rows), moving, 4) - 1) * scale
        angle = 2 * math.pi * offset[:, :1]
        direction = torch.cat((torch.cos(angle), torch.sin(angle)), 1)
        common = self.noise_offset * offset[:, 1:] * direction
        square = (2 * noise.view(len(rows), self.num_noise, 2) - 1) * self.spread
        self.state[rows, moving:, :2] = common[:, None] + square

    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        pushes = self._steering.forces(actions["agent"])
        self.integrate(torch.cat((pushes, self._wander()), 1))
        away = self._agent_position - self.centroid()[:, None]
        distance = torch.linalg.vector_norm(away, dim=-1)
        return {"agent": distance.sqrt_().mul_(-self.reward_scale)}, self._never

    def _wander(self) -> Tensor:
        """The forces ``(num_envs, num_signal, 2)`` of unit length, (sin, cos)."""
        turns = self.dynamics.next()[..., None]
        angles = torch.add(self._phases, turns, alpha=2 * math.pi)
        return angles.sin_().mul_(SIGNAL_ACCELERATION)

    def _describe(self) -> AgentGroup:
        tokens = self._order.shape[1]
        spec = TokenSpec(
            tokens, 4, TYPE_NAMES, signal_types=SIGNAL_TYPES, positions=POSITION
        )
        return AgentGroup(self.num_agents, spec, self._steering.space)

    def _bind(self, state: Tensor) -> None:
        super()._bind(state)
        agents, moving, batch = self.num_agents, self.num_movable, len(state)
        self._agent_position = state[:, :agents, :2]
        self._signal_position = state[:, agents:moving, :2]
        self._never = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self._batch_types = self._types.expand(batch, -1, -1).contiguous()
        self._batch_padding = torch.zeros_like(self._batch_types, dtype=torch.bool)


def _token_order(agents: int, signal: int, noise: int) -> Tensor:
    """The entity of each token, ``(agents, N)``: self, noise, others, signal."""
    moving = agents + signal
    still = list(range(moving, moving + noise))
    heard = list(range(agents, moving))
    others = [[j for j in range(agents) if j != i] for i in range(agents)]
    return torch.tensor([[i, *still, *others[i], *heard] for i in range(agents)])


def _token_types(agents: int, signal: int, noise: int) -> Tensor:
    """The type of each token, ``(agents, N)``, in the order of `_token_order`."""
    names = ["self", *["noise"] * noise, *["agent"] * (agents - 1)]
    names += ["signal"] * signal
    row = torch.tensor([TYPE_NAMES.index(name) for name in names])
    return row.expand(agents, -1).contiguous()
