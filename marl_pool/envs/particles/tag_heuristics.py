"""Scripted predators and prey for simple tag, by what the tokens show."""

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
"""Seconds of the present velocity until a force has moved an agent."""


class Steered(Policy):
    """A policy that knows which force it wants.

    Args:
        group: whose agents it controls, for its action space.
    """

    role: ClassVar[str]

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        continuous = isinstance(group.action_space, spaces.Box)
        self.steering = Steering(ACCELERATIONS[self.role], continuous)
        self.config: dict[str, Any] = {}

    @abstractmethod
    def force(self, tokens: Tokens) -> Tensor:
        """The force ``(*B, 2)`` wanted, before it is cut."""

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide; ``logits`` are the force before it is cut. See `Policy.act`."""
        force = self.force(tokens)
        none = force.new_zeros(tokens.batch_shape)
        return Decision(self.steering.toward(force), none, none, force, state)


class ChaseHeuristic(Steered):
    r"""Run after the nearest prey.

    A force moves a predator two steps later. With d and w a prey's position and
    velocity relative to the predator, the force after which the two meet two steps
    on, if nothing else pushes, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    of which the smallest is taken, cut to what the action space allows. Padded tokens
    and obstacles are ignored; without a prey token there is no force.

    Args:
        group: the predators' group, for its action space.
    """

    role = "predator"

    def force(self, tokens: Tokens) -> Tensor:
        """The force ``(*B, 2)`` that takes each predator to its nearest prey."""
        shown, missing = _of_type(tokens, "prey")
        ahead = shown[..., :2] + LEAD * shown[..., 2:]
        squares = ahead.square().sum(-1).masked_fill(missing, torch.inf)
        nearest = squares.argmin(-1)[..., None, None].expand(*missing.shape[:-1], 1, 2)
        return ahead.gather(-2, nearest)[..., 0, :] / DT**2


class FleeHeuristic(Steered):
    """Run from predators, as the world's own prey do with ``prey="flee"``.

    The rule is `flight`. Home is there the world's centre, which no token shows; here
    it is the mean position of all others. Without a token of another there is no
    force, and padded ones are ignored.

    Args:
        group: the prey's group, for its action space.
    """

    role = "prey"

    def force(self, tokens: Tokens) -> Tensor:
        """The force ``(*B, 2)`` of `flight`, as strong as prey can push."""
        predators, missing = _of_type(tokens, "predator")
        others = ~tokens.padding & (tokens.types != TYPE_NAMES.index("self"))
        shown = torch.where(others[..., None], tokens.features[..., :2], 0.0)
        home = shown.sum(-2) / others.sum(-1, keepdim=True).clamp(min=1)
        away = flight(predators[..., :2], home, missing)
        return away * self.steering.acceleration


def _of_type(tokens: Tokens, name: str) -> tuple[Tensor, Tensor]:
    """Features with all but tokens of a type set to zero, and which were."""
    missing = (tokens.types != TYPE_NAMES.index(name)) | tokens.padding
    # What lies under padding may be NaN, so it is replaced, not multiplied away.
    return torch.where(missing[..., None], 0.0, tokens.features), missing
