"""Simple centroid: stay at the centroid of signal entities among distractors."""

import math
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import BLUE, GREEN, PURPLE
from marl_pool.envs.options import entity_counts
from marl_pool.envs.particles.physics import (
    Entities,
    ParticleEnv,
    ParticleOptions,
)
from marl_pool.options.types import (
    Counts,
    Episodes,
    NonNegativeFloat,
    PositiveFloat,
    Size,
    SizeOrZero,
)
from marl_pool.utils.errors import InputError

FEATURE_SCALE = 5.0
"""Divisor of relative positions and velocities."""
AGENT_ACCELERATION = 5.0
START_SPEED = 2.0
"""Largest initial speed along an axis."""


class SimpleCentroid(ParticleEnv):
    r"""Agents stay at the centroid of wandering signal entities.

    Each agent observes every entity as a token: position and velocity relative to its
    own, divided by 5, and the type. The order is self, noise, other agents, signal. An
    agent's reward, computed after the step, is

    .. math:: r = -c\, \lVert p_{agent} - \bar p_{signal} \rVert_2^{1/2}

    so the noise entities, which never move, are distractors. In each step a force of
    constant magnitude and uniform random direction acts on each signal entity. Nothing
    collides, there are no walls, and episodes end by truncation only.

    Agents and signals start uniformly in the square of half side ``spread``, with
    velocities uniform in [-2, 2] along each axis. Noise entities start uniformly in
    the same square, shifted by one common offset of uniform direction and of length
    uniform in [``least_noise_offset``, ``noise_offset``].

    Source: `AdaPool <https://arxiv.org/abs/2506.09215>`_, section 4.3.1 and appendix
    C.4, and the published environment. Differences from the latter: the seed determines
    the start (there it was ignored); with several agents, each receives the reward and
    observation of the current step (there, all but the first received them a step
    late), and all are truncated together. Earlier revisions of that environment had
    other values of ``reward_power`` (1 and 2), ``least_noise_offset`` (2.5) and
    ``signal_acceleration`` (5).

    Args:
        counts: numbers of agents, signal and noise entities, in the paper's notation.
        num_agents: learning agents; None uses ``counts``.
        num_signal: signal entities; None uses ``counts``.
        num_noise: noise entities; None uses ``counts``.
        reward_scale: factor c of the reward.
        reward_power: exponent of the distance in the reward.
        noise_offset: largest length of the common offset of noise.
        least_noise_offset: smallest length of that offset, at most ``noise_offset``.
        signal_acceleration: acceleration of signal entities, in units of length per
            squared time.
        spread: half side of the starting square; None for
            ``max(log4(number of entities), 2)``.

    Raises:
        InputError: ``least_noise_offset`` above ``noise_offset``.
    """

    type_names = ("self", "agent", "signal", "noise")
    feature_scale = FEATURE_SCALE

    def __init__(
        self,
        num_envs: Episodes,
        *,
        counts: Counts = "1-3-28",
        num_agents: Size | None = None,
        num_signal: Size | None = None,
        num_noise: SizeOrZero | None = None,
        continuous_actions: bool = True,
        reward_scale: PositiveFloat = 0.01,
        reward_power: PositiveFloat = 0.5,
        noise_offset: NonNegativeFloat = 1.0,
        least_noise_offset: NonNegativeFloat = 0.0,
        signal_acceleration: NonNegativeFloat = 1.0,
        spread: PositiveFloat | None = None,
        max_steps: Episodes = 128,
        **common: Unpack[ParticleOptions],
    ) -> None:
        # Numbers of agents, signal and noise, of which options may replace some.
        numbers = entity_counts(
            counts,
            least=(1, 1, 0),
            num_agents=num_agents,
            num_signal=num_signal,
            num_noise=num_noise,
        )
        self.num_agents, self.num_signal, self.num_noise = numbers
        # Spread the entities over a larger area if there are more of them.
        self.spread = max(math.log(sum(numbers), 4), 2.0) if spread is None else spread
        if least_noise_offset > noise_offset:
            raise InputError(
                f"env.least_noise_offset: expected at most env.noise_offset="
                f"{noise_offset:g}, got {least_noise_offset:g}"
            )
        self.reward_scale, self.reward_power = reward_scale, reward_power
        self.noise_offset, self.least_noise_offset = noise_offset, least_noise_offset
        self.signal_acceleration = signal_acceleration
        super().__init__(
            num_envs,
            entities=(
                Entities(
                    "agent",
                    self.num_agents,
                    GREEN,
                    0.075,
                    max_speed=5.0,
                    acceleration=AGENT_ACCELERATION,
                    signal=False,  # the positions of other agents do not matter
                ),
                Entities("signal", self.num_signal, BLUE, max_speed=2.0),
                Entities("noise", self.num_noise, PURPLE, movable=False, signal=False),
            ),
            learners=("agent",),
            continuous_actions=continuous_actions,
            extent=self.spread + max(noise_offset, 1.0) + 0.25,
            max_steps=max_steps,
            **common,
            random_numbers={"signal": 1},
        )
        # Half sides of the squares of initial positions and velocities.
        scale = (self.spread, self.spread, START_SPEED, START_SPEED)
        self._start_scale = self._constant(scale)
        # Phases of (sin, cos), because cos(x) = sin(x + π / 2).
        self._phases = self._constant([0.0, math.pi / 2])

    def centroid(self) -> Tensor:
        """Return the mean position of the signal entities, ``(num_envs, 2)``."""
        positions = self._positions["signal"]
        if self.lives is None:
            return positions.mean(1)
        count = self.present[:, self._slices["signal"]].sum(1, keepdim=True)
        return self.fill_absent(positions, "signal", 1, 0).sum(1) / count

    @override
    def goals(self) -> Tensor:
        return self.centroid()[:, None]

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        moving = self.num_movable
        parts = [4 * moving, 2, 2 * self.num_noise]
        uniform = self.sample_uniform(keys, sum(parts))
        start, offset, noise = torch.split(uniform, parts, 1)
        # Agents and signal: positions and velocities in their squares.
        start = 2 * start.view(len(rows), moving, 4) - 1
        self.state[rows, :moving] = start * self._start_scale
        # Noise: a square with one offset for all, in polar coordinates.
        angle = 2 * math.pi * offset[:, :1]
        direction = torch.cat((torch.cos(angle), torch.sin(angle)), 1)
        span = self.noise_offset - self.least_noise_offset
        common = (self.least_noise_offset + span * offset[:, 1:]) * direction
        square = (2 * noise.view(len(rows), self.num_noise, 2) - 1) * self.spread
        self.state[rows, moving:, :2] = common[:, None] + square

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        # Agents steer, signal entities wander, and noise entities rest.
        pushes = self._steering["agent"].forces(actions["agent"])
        turns = self.dynamics.next()[..., None]
        # A random angle for each entity: with the phases 0 and π/2 its sines are the
        # coordinates of a unit vector.
        angles = torch.add(self._phases, turns, alpha=2 * math.pi)
        wandering = angles.sin_().mul_(self.signal_acceleration)
        self.integrate(torch.cat((pushes, wandering), 1))
        away = self._positions["agent"] - self.centroid()[:, None]
        distance = torch.linalg.vector_norm(away, dim=-1)
        reward = distance.pow_(self.reward_power).mul_(-self.reward_scale)
        return {"agent": self.fill_absent(reward, "agent", 1, 0)}, self._never
