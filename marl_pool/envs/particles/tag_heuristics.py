"""Scripted predators and prey of simple tag, which read their tokens."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.actions import Steering
from marl_pool.envs.particles.physics import DAMPING, DT
from marl_pool.envs.particles.simple_tag import ACCELERATIONS, TYPE_NAMES, flight
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

LEAD = (2 - DAMPING) * DT
"""Seconds for which the present velocity counts before a force changes a position."""


class Steered(Policy):
    """Base of policies that compute a force and take the nearest action.

    Args:
        group: the group of agents that it controls.
    """

    role: ClassVar[str]

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        continuous = isinstance(group.action_space, spaces.Box)
        self.steering = Steering(ACCELERATIONS[self.role], continuous)
        self.config: dict[str, Any] = {}

    @abstractmethod
    def force(self, tokens: Tokens) -> Tensor:
        """Return the desired force ``(*B, 2)``, before it is clipped."""

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """See `Policy.act`; ``logits`` are the force before it is clipped."""
        force = self.force(tokens)
        none = force.new_zeros(tokens.batch_shape)
        return Decision(self.steering.toward(force), none, none, force, state)


class ChaseHeuristic(Steered):
    r"""Pursue the nearest prey.

    A force changes a predator's position two steps later. With d and w a prey's
    position and velocity relative to the predator, the force that makes the two meet
    in two steps, if no other force acts, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    The smallest of these forces is taken and clipped to the action space. Obstacles
    and padded tokens are ignored; without a prey token the force is zero.

    Args:
        group: the group of the predators.
    """

    role = "predator"

    def force(self, tokens: Tokens) -> Tensor:
        """Return the force ``(*B, 2)`` of each predator toward its nearest prey."""
        shown, missing = _of_type(tokens, "prey")
        ahead = shown[..., :2] + LEAD * shown[..., 2:]
        squares = ahead.square().sum(-1).masked_fill(missing, torch.inf)
        nearest = squares.argmin(-1)[..., None, None].expand(*missing.shape[:-1], 1, 2)
        return ahead.gather(-2, nearest)[..., 0, :] / DT**2


class FleeHeuristic(Steered):
    """Flee from predators, like the scripted prey of ``prey="flee"``.

    The force is that of `flight`. The environment's prey has its home at the origin,
    which no token shows; here the home is the mean position of all other entities.
    Padded tokens are ignored; without another entity the force is zero.

    Args:
        group: the group of the prey.
    """

    role = "prey"

    def force(self, tokens: Tokens) -> Tensor:
        """Return the force ``(*B, 2)`` of `flight` at full acceleration."""
        predators, missing = _of_type(tokens, "predator")
        others = ~tokens.padding & (tokens.types != TYPE_NAMES.index("self"))
        shown = torch.where(others[..., None], tokens.features[..., :2], 0.0)
        home = shown.sum(-2) / others.sum(-1, keepdim=True).clamp(min=1)
        away = flight(predators[..., :2], home, missing)
        return away * self.steering.acceleration


def _of_type(tokens: Tokens, name: str) -> tuple[Tensor, Tensor]:
    """Zero the features of all other types; also return the mask of zeroed slots."""
    missing = (tokens.types != TYPE_NAMES.index(name)) | tokens.padding
    # Padded slots may hold NaN, so replace them instead of multiplying by zero.
    return torch.where(missing[..., None], 0.0, tokens.features), missing
