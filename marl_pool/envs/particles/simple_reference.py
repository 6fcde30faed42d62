"""Simple reference: two agents name each other's landmark."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import GREEN, OBSTACLE
from marl_pool.envs.particles.physics import Entities
from marl_pool.envs.particles.speaking import (
    EVERYTHING,
    MOTION,
    SpeakingEnv,
    SpeakingOptions,
)
from marl_pool.options.types import Episodes, Size, UnitInterval

ACCELERATION = 5.0


class SimpleReference(SpeakingEnv):
    r"""Two agents each have to go to a landmark that only the other one knows.

    Agent i knows the goal of agent j and gets, with d_j the distance of j to it,

    .. math:: r_i = -(1 - \lambda) (d_i + d_j) / 2 - \lambda\, d_j

    where :math:`\lambda` is the ``local_ratio``. Each moves and speaks in every step.

    A token has position and velocity relative to the observer, the identity of a
    landmark as a one-hot vector, and a message. The set is the agent's own token, with
    the identity of the other agent's goal; the landmarks with their identities,
    which mpe2's vector conveys by their order; and the other agent's token, which holds
    nothing but its message of the last step. All start at rest and uniformly in
    [-1, 1] along each axis. Episodes end by truncation only.

    Source: ``simple_reference_v3`` of `mpe2 <https://mpe2.farama.org>`_ (`Lowe et al.,
    2017 <https://arxiv.org/abs/1706.02275>`_), whose physics, starts, actions and
    rewards these are. There, goals are colors, and there are always three landmarks
    and ten words.

    Args:
        num_landmarks: landmarks.
        num_words: words, the size of a message.
        local_ratio: weight of the other agent's distance against the mean of both.
        continuous_actions: True for five numbers in [0, 1], of which the second to
            fifth push left, right, down and up, and one number for each word; False
            for one of 5 x ``num_words`` choices, move + 5 word, with the moves no-op,
            left, right, down and up.
    """

    type_names = ("self", "landmark", "agent")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_landmarks: Size = 3,
        num_words: Size = 10,
        local_ratio: UnitInterval = 0.5,
        **common: Unpack[SpeakingOptions],
    ) -> None:
        self.local_ratio = local_ratio
        super().__init__(
            num_envs,
            entities=(
                Entities("agent", 2, GREEN, acceleration=ACCELERATION),
                Entities(
                    "landmark", num_landmarks, OBSTACLE, movable=False, on_top=True
                ),
            ),
            learners=("agent",),
            lone=("agent",),
            marks={"agent": num_landmarks + num_words},
            hidden={"agent": {"agent": EVERYTHING}},
            speaker="agent",
            num_words=num_words,
            num_goals=2,
            **common,
        )

    @override
    def mark(self, group: str, features: Tensor) -> None:
        marks = features[..., MOTION:]
        marks[:, :, 0, : self.num_landmarks] = self._identities[self.goal]
        landmarks = slice(1, 1 + self.num_landmarks)
        marks[:, :, landmarks, : self.num_landmarks] = self._identities
        # The other agent's token is the last.
        marks[:, :, -1, self.num_landmarks :] = self.words.flip(1)

    @override
    def goal_marks(self) -> Tensor:
        """Return the way of each agent to the landmark that the other one knows."""
        marks = torch.zeros_like(self.state[..., :2])
        marks[:, self._slices["agent"]] = self._ways()
        return marks

    def _ways(self) -> Tensor:
        """Return the ways ``(num_envs, 2, 2)`` of the agents to their landmarks."""
        # An agent knows the goal of the other.
        return self.goal_places().flip(1) - self._positions["agent"]

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        moves = self.hear(actions["agent"])
        self.integrate(self._steering["agent"].forces(moves))
        # Each agent is rewarded for the other one's distance.
        ways = self._ways().flip(1)
        distance = torch.hypot(ways[..., 0], ways[..., 1])
        shared = distance.mean(1, keepdim=True)
        reward = -(1 - self.local_ratio) * shared - self.local_ratio * distance
        return {"agent": reward}, self._never
