"""Scripted agents of simple_world_comm: hunters, a leader that points, and prey."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from marl_pool.envs.particles.heuristics import ForceHeuristic, observer_features
from marl_pool.envs.particles.physics import DIRECTIONS
from marl_pool.envs.particles.simple_tag import flight
from marl_pool.envs.particles.simple_world_comm import FEATURES, PREDATORS
from marl_pool.envs.particles.speaking import MOTION
from marl_pool.envs.particles.speaking_heuristics import steer
from marl_pool.tokens import Tokens

QUADRANTS = ((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5), (0.5, 0.5))
"""Centres of the quadrants of the plane, one for each of the leader's words."""
DANGER = 0.5
"""Distance of a predator from which prey flee."""


class WorldHeuristic(ForceHeuristic):
    """Base of scripts that find visible tokens by their types."""

    def visible(self, tokens: Tokens, *names: str) -> Tensor:
        """Return which tokens of these types are in sight, ``(*B, N)`` bool."""
        # Agents that a forest hides are all zero.
        in_sight = ~tokens.padding & (tokens.features[..., :2] != 0).any(-1)
        is_type = [tokens.types == self.types[name] for name in names]
        return in_sight & torch.stack(is_type).any(0)


class HunterHeuristic(WorldHeuristic):
    """Pursue the nearest prey in sight; else go to the quadrant that the leader named.

    The force is the dead-beat one of `ChaseHeuristic`.
    """

    acceleration = 3.0

    @override
    def force(self, tokens: Tokens) -> Tensor:
        prey = self.visible(tokens, "agent")
        chase = steer(tokens, nearest(tokens, prey))
        leader = tokens.types == self.types[PREDATORS[0]]
        marks = torch.where(leader[..., None], tokens.features[..., MOTION:], 0.0)
        words = marks.sum(-2)[..., FEATURES:][..., : len(QUADRANTS)]
        centres = words.new_tensor(QUADRANTS)[: words.shape[-1]]
        position = observer_place(tokens)
        search = words @ centres - position * words.any(-1, keepdim=True)
        return torch.where(prey.any(-1, keepdim=True), chase, search)


class LeaderHeuristic(HunterHeuristic):
    """Pursue the nearest prey, and name the quadrant in which it is.

    With fewer than four words the last one stands for the other quadrants.
    """

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        force = self.force(tokens)
        move = self.steering.toward(force)
        prey = nearest(tokens, self.visible(tokens, "agent"))
        # Padded slots may hold NaN.
        away = torch.where(prey[..., None] > 0, tokens.features[..., :2], 0.0).sum(-2)
        place = away + observer_place(tokens)
        num_words = tokens.features.shape[-1] - MOTION - FEATURES
        word = (place[..., 0] > 0) + 2 * (place[..., 1] > 0)
        word = word.clamp(max=num_words - 1)
        if self.steering.continuous:
            return torch.cat((move, one_hot(word, num_words).to(move)), -1), force
        return move + len(DIRECTIONS) * word, force


class ForagerHeuristic(WorldHeuristic):
    """Flee from predators within `DANGER`, else go to the nearest food.

    Prey flee by `flight`, with the origin as home. Forests are ignored.
    """

    acceleration = 4.0

    @override
    def force(self, tokens: Tokens) -> Tensor:
        away = tokens.features[..., :2]
        threats = self.visible(tokens, *PREDATORS) & (away.norm(dim=-1) < DANGER)
        escape = flight(away, -observer_place(tokens), ~threats) * self.acceleration
        meal = steer(tokens, nearest(tokens, self.visible(tokens, "food")))
        return torch.where(threats.any(-1, keepdim=True), escape, meal)


def observer_place(tokens: Tokens) -> Tensor:
    """Return the observer's absolute position ``(*B, 2)``."""
    return observer_features(tokens)[..., MOTION + 1 : MOTION + FEATURES]


def nearest(tokens: Tokens, among: Tensor) -> Tensor:
    """Return weights ``(*B, N)``, 1 for the nearest of these tokens and 0 else."""
    squares = tokens.features[..., :2].square().sum(-1)
    place = squares.masked_fill(~among, torch.inf).argmin(-1)
    return (one_hot(place, among.shape[-1]).bool() & among).to(squares.dtype)
