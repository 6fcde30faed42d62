"""Simple adversary: agents cover a goal without revealing it to an adversary."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE, PURPLE
from marl_pool.envs.particles.physics import Entities
from marl_pool.envs.particles.speaking import VELOCITY, SpeakingEnv, SpeakingOptions
from marl_pool.options.types import Episodes, Size

ACCELERATION = 5.0


class SimpleAdversary(SpeakingEnv):
    r"""Agents cover one landmark, the goal; an adversary does not know which it is.

    With d and d_j the distances of the adversary and of agent j to the goal, the
    adversary gets -d and every agent, with d summed over adversaries where some arrive,

    .. math:: r = d - \min_j d_j

    A token has the position relative to the observer, a velocity that is always zero,
    since mpe2 shows none, and in the agents' sets a further feature, 1 for the goal and
    0 else. The order is self, landmarks, other agents. All start at rest and uniformly
    in [-1, 1] along each axis. Episodes end by truncation only.

    Source: ``simple_adversary_v3`` of `mpe2 <https://mpe2.farama.org>`_ (`Lowe et al.,
    2017 <https://arxiv.org/abs/1706.02275>`_), whose physics, starts and rewards these
    are. There, the numbers of landmarks and agents are equal.

    Args:
        num_agents: agents besides the one adversary.
        num_landmarks: landmarks; None for as many as agents.
    """

    type_names = ("self", "landmark", "adversary", "agent")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_agents: Size = 2,
        num_landmarks: Size | None = None,
        **common: Unpack[SpeakingOptions],
    ) -> None:
        still = dict.fromkeys(self.type_names, VELOCITY)
        super().__init__(
            num_envs,
            entities=(
                Entities("adversary", 1, PURPLE, 0.15, acceleration=ACCELERATION),
                Entities("agent", num_agents, GREEN, 0.15, acceleration=ACCELERATION),
                Entities(
                    "landmark",
                    num_agents if num_landmarks is None else num_landmarks,
                    OBSTACLE,
                    0.08,
                    movable=False,
                    on_top=True,
                ),
            ),
            learners=("adversary", "agent"),
            marks={"adversary": 0, "agent": 1},
            hidden={"adversary": still, "agent": still},
            num_goals=1,
            **common,
        )

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        forces = [self._steering[name].forces(actions[name]) for name in self.groups]
        self.integrate(torch.cat(forces, 1))
        adversaries, agents = map(self.goal_distances, ("adversary", "agent"))
        nearest = self.fill_absent(agents, "agent", 1, torch.inf).amin(1, keepdim=True)
        away = self.fill_absent(adversaries, "adversary", 1, 0).sum(1, keepdim=True)
        reward = (away - nearest).expand_as(agents)
        return self.earned(adversary=-adversaries, agent=reward), self._never
