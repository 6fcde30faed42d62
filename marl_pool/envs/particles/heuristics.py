"""Scripted agents of the particle environments, which read their tokens."""

from abc import abstractmethod
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles import simple_centroid, simple_spread, simple_tag
from marl_pool.envs.particles.physics import LEAD, Steering, dead_beat
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import SELF_TYPE, Tokens


def is_observer(tokens: Tokens) -> Tensor:
    """Return which token is the observer's own, ``(*B, N)`` bool."""
    return (tokens.types == SELF_TYPE) & ~tokens.padding


def observer_features(tokens: Tokens) -> Tensor:
    """Return the features ``(*B, F)`` of the observer's own token, 0 without it."""
    mask, features = is_observer(tokens), tokens.features
    slot = mask.byte().argmax(-1)[..., None, None]
    slot = slot.expand(*slot.shape[:-1], features.shape[-1])
    has_observer = mask.any(-1, keepdim=True)
    return torch.where(has_observer, features.gather(-2, slot)[..., 0, :], 0.0)


class ForceHeuristic(Heuristic):
    """Base of policies that compute a force and take the nearest action.

    `Decision.logits` are the force before it is clipped.
    """

    acceleration: ClassVar[float]
    """Force of a full push to one side."""

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        continuous = isinstance(group.action_space, spaces.Box)
        self.steering = Steering(self.acceleration, continuous)
        names = group.tokens.type_names
        self.types = {name: number for number, name in enumerate(names)}
        """Number of each type of tokens."""

    @abstractmethod
    def force(self, tokens: Tokens) -> Tensor:
        """Return the desired force ``(*B, 2)``, before it is clipped."""

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        force = self.force(tokens)
        return self.steering.toward(force), force


class CentroidHeuristic(ForceHeuristic):
    r"""Dead-beat controller that steers to the centroid of the signal tokens.

    A force changes an agent's position two steps later. With d and w the mean position
    and velocity of the signal relative to the agent, the force that puts the agent on
    the centroid in two steps, if no other force acts, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    clipped to the action space. Agent and signal have the same damping, so only the
    relative velocity w enters. Noise and padded tokens are ignored; without a signal
    token the force is zero.
    """

    acceleration = simple_centroid.AGENT_ACCELERATION
    lead = LEAD

    @override
    def force(self, tokens: Tokens) -> Tensor:
        signal, missing = _of_type(tokens, self.types["signal"])
        count = (~missing).sum(-1, keepdim=True).clamp(min=1)
        # Features are lengths and velocities divided by this scale.
        mean = signal.sum(-2) * (simple_centroid.FEATURE_SCALE / count)
        return dead_beat(mean, lead=self.lead)


class ChaseHeuristic(ForceHeuristic):
    r"""Pursue the nearest prey.

    A force changes a predator's position two steps later. With d and w a prey's
    position and velocity relative to the predator, the force that makes the two meet
    in two steps, if no other force acts, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    The smallest of these forces is taken and clipped to the action space. Obstacles
    and padded tokens are ignored; without a prey token the force is zero.
    """

    acceleration = simple_tag.ACCELERATIONS["predator"]

    @override
    def force(self, tokens: Tokens) -> Tensor:
        prey, missing = _of_type(tokens, self.types["prey"])
        forces = dead_beat(prey)
        squares = forces.square().sum(-1).masked_fill(missing, torch.inf)
        nearest = squares.argmin(-1)[..., None, None].expand(*missing.shape[:-1], 1, 2)
        return forces.gather(-2, nearest)[..., 0, :]


class FleeHeuristic(ForceHeuristic):
    """Flee from predators, like the scripted prey of ``prey="flee"``.

    The force is `flight`'s. The environment's prey has its home at the origin,
    which no token shows; here the home is the mean position of all other entities.
    Padded tokens are ignored; without another entity the force is zero.
    """

    acceleration = simple_tag.ACCELERATIONS["prey"]

    @override
    def force(self, tokens: Tokens) -> Tensor:
        predators, missing = _of_type(tokens, self.types["predator"])
        neighbors = ~tokens.padding & (tokens.types != SELF_TYPE)
        positions = torch.where(neighbors[..., None], tokens.features[..., :2], 0.0)
        home = positions.sum(-2) / neighbors.sum(-1, keepdim=True).clamp(min=1)
        away = simple_tag.flight(predators[..., :2], home, missing)
        return away * self.acceleration


class SpreadHeuristic(ForceHeuristic):
    """Go to a landmark that is assigned to no other agent.

    Agents and landmarks are paired by `nearest_pairs`. All agents see the same set, so
    each of them finds the same pairs. The force is the dead-beat one of
    `ChaseHeuristic` toward the agent's landmark, and zero for an agent without one.
    """

    acceleration = simple_spread.AGENT_ACCELERATION

    @override
    def force(self, tokens: Tokens) -> Tensor:
        landmarks, no_landmark = _of_type(tokens, self.types["landmark"])
        agents, no_agent = _of_type(tokens, self.types["agent"])
        is_self = (tokens.types == SELF_TYPE) & ~tokens.padding
        # Among the agents the observer has its own token, at position 0.
        away = landmarks[..., None, :, :2] - agents[..., :, None, :2]
        distance = torch.hypot(away[..., 0], away[..., 1])
        unfit = no_landmark[..., None, :] | (no_agent & ~is_self)[..., :, None]
        partner = nearest_pairs(distance.masked_fill(unfit, torch.inf))
        # The observer's landmark, or none.
        goal = partner.masked_fill(~is_self, -1).amax(-1)[..., None, None]
        target = landmarks.gather(-2, goal.clamp(min=0).expand(*goal.shape[:-1], 4))
        return torch.where(goal < 0, 0.0, dead_beat(target))[..., 0, :]


def nearest_pairs(distance: Tensor) -> Tensor:
    """Pair rows with columns greedily, the nearest pair first, each of them once.

    Args:
        distance: ``(*B, n, m)``, infinity for a pair that is not allowed.

    Returns:
        The column of each row, ``(*B, n)`` int64, -1 for a row without one.
    """
    num_rows, num_columns = distance.shape[-2:]
    rows = torch.arange(num_rows, device=distance.device)
    columns = torch.arange(num_columns, device=distance.device)
    partner = torch.full_like(distance[..., 0], -1, dtype=torch.int64)
    for _ in range(min(num_rows, num_columns)):
        least, pair = distance.flatten(-2).min(-1, keepdim=True)
        is_row = (rows == pair // num_columns) & least.isfinite()
        column = pair % num_columns
        partner = torch.where(is_row, column, partner)
        paired = is_row[..., :, None] | (columns == column)[..., None, :]
        distance = distance.masked_fill(paired, torch.inf)
    return partner


def _of_type(tokens: Tokens, number: int) -> tuple[Tensor, Tensor]:
    """Zero the features of all other types; also return the mask of zeroed slots."""
    missing = (tokens.types != number) | tokens.padding
    # Padded slots may hold NaN, so replace them instead of multiplying by zero.
    return torch.where(missing[..., None], 0.0, tokens.features), missing
