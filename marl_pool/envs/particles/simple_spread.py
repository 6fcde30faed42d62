"""Simple spread: agents cover landmarks and avoid each other."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE
from marl_pool.envs.particles.physics import (
    Entities,
    ParticleEnv,
    ParticleOptions,
    distances,
)
from marl_pool.options.types import Episodes, Size, UnitInterval

AGENT_SIZE, LANDMARK_SIZE = 0.15, 0.05
AGENT_ACCELERATION = 5.0
START = 1.0
"""Half side of the square in which agents and landmarks start."""


class SimpleSpread(ParticleEnv):
    r"""Agents share the task of covering all landmarks without touching each other.

    An agent observes every entity as a token: position and velocity relative to its
    own, and the type. The order is self, landmarks, other agents. The reward of agent i
    after a step is

    .. math:: r_i = -(1 - \lambda) \sum_l \min_j d_{jl} - \lambda\, n_i

    with d the distance of agent j to landmark l, n the number of agents closer to agent
    i than the sum of their radii, and :math:`\lambda` the ``local_ratio``. Agents start
    at rest. They and the landmarks are uniform in [-1, 1] along each axis. Episodes end
    by truncation only.

    Source: ``simple_spread_v3`` of `mpe2 <https://mpe2.farama.org>`_ (`Lowe et al.,
    2017 <https://arxiv.org/abs/1706.02275>`_), whose physics, starts and rewards these
    are. Differences:

    - An observation is tokens in place of a vector, and lacks the agent's own position
      in the plane, on which the reward does not depend, and the messages, which are
      always zero there.
    - Coinciding centres exert no contact force, where mpe2 divides by zero.
    - The number of landmarks may differ from the number of agents.

    docs/mpe.md converts returns to the conventions of other libraries.

    Args:
        num_agents: agents.
        num_landmarks: landmarks; None for as many as agents.
        local_ratio: weight of an agent's own collisions against the distances that all
            share.
    """

    type_names = ("self", "landmark", "agent")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_agents: Size = 3,
        num_landmarks: Size | None = None,
        local_ratio: UnitInterval = 0.5,
        continuous_actions: bool = False,
        max_steps: Episodes = 25,
        **common: Unpack[ParticleOptions],
    ) -> None:
        self.num_agents = num_agents
        self.num_landmarks = num_agents if num_landmarks is None else num_landmarks
        self.local_ratio = local_ratio
        super().__init__(
            num_envs,
            entities=(
                Entities(
                    "agent",
                    num_agents,
                    GREEN,
                    AGENT_SIZE,
                    collide=True,
                    acceleration=AGENT_ACCELERATION,
                ),
                Entities(
                    "landmark",
                    self.num_landmarks,
                    OBSTACLE,
                    LANDMARK_SIZE,
                    movable=False,
                    on_top=True,
                ),
            ),
            learners=("agent",),
            continuous_actions=continuous_actions,
            extent=START + 0.5,
            max_steps=max_steps,
            **common,
        )

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        count = len(self.entities)
        square = 2 * self.sample_uniform(keys, 2 * count) - 1
        self.state[rows, :, :2] = START * square.view(len(rows), count, 2)
        self.state[rows, :, 2:] = 0

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        self.integrate(self._steering["agent"].forces(actions["agent"]))
        agents, landmarks = self._positions["agent"], self._positions["landmark"]
        # Shared: how far the nearest agent is from each landmark.
        distance = distances(landmarks, agents)
        nearest = self.fill_absent(distance, "agent", 2, torch.inf).amin(2)
        shared = self.fill_absent(nearest, "landmark", 1, 0).sum(1, keepdim=True)
        # Own: the other agents that it touches; its distance to itself is 0.
        touching = distances(agents, agents) < 2 * AGENT_SIZE
        touching = self.fill_absent(touching, "agent", 2, False)
        collisions = touching.sum(2, dtype=self.dtype).sub_(1)
        reward = -(1 - self.local_ratio) * shared - self.local_ratio * collisions
        return self.earned(agent=reward), self._never
