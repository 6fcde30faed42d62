"""Simple push: an adversary pushes an agent away from its goal."""

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


class SimplePush(SpeakingEnv):
    r"""An agent goes to a goal; an adversary that does not know it pushes it away.

    With d and d_1 the distances of the adversary and of the agent to the goal, the
    agent gets -d_1 and the adversary d_1 - d, with the d_1 of the nearest agent where
    some arrive. All collide.

    A token has position and velocity relative to the observer, and in the agent's set
    a further feature, 1 for the goal and 0 else. The velocity of the other one is zero,
    since mpe2 shows only the observer's own. The order is self, landmarks, the other
    one. All start at rest and uniformly in [-1, 1] along each axis. Episodes end by
    truncation only.

    Source: ``simple_push_v3`` of `mpe2 <https://mpe2.farama.org>`_ (`Lowe et al., 2017
    <https://arxiv.org/abs/1706.02275>`_), whose physics, starts and rewards these are.
    There, observations also hold colors, which tell the two landmarks apart and mean
    nothing else, and there are always two landmarks.

    Args:
        num_landmarks: landmarks.
    """

    type_names = ("self", "landmark", "adversary", "agent")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_landmarks: Size = 2,
        **common: Unpack[SpeakingOptions],
    ) -> None:
        unseen = dict.fromkeys(("adversary", "agent"), VELOCITY)
        super().__init__(
            num_envs,
            entities=(
                Entities(
                    "adversary", 1, PURPLE, collide=True, acceleration=ACCELERATION
                ),
                Entities("agent", 1, GREEN, collide=True, acceleration=ACCELERATION),
                Entities(
                    "landmark", num_landmarks, OBSTACLE, movable=False, on_top=True
                ),
            ),
            learners=("adversary", "agent"),
            marks={"adversary": 0, "agent": 1},
            hidden={"adversary": unseen, "agent": unseen},
            num_goals=1,
            **common,
        )

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        forces = [self._steering[name].forces(actions[name]) for name in self.groups]
        self.integrate(torch.cat(forces, 1))
        adversaries, agents = map(self.goal_distances, ("adversary", "agent"))
        nearest = self.fill_absent(agents, "agent", 1, torch.inf).amin(1, keepdim=True)
        return self.earned(adversary=nearest - adversaries, agent=-agents), self._never
