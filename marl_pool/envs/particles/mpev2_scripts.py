"""Scripted agents of MPEv2's tasks: anchors of its tables, not optima."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from marl_pool.envs.particles import mpev2
from marl_pool.envs.particles.heuristics import LEAD, ForceHeuristic, nearest_pairs
from marl_pool.envs.particles.mpev2 import MASS, Task
from marl_pool.envs.particles.physics import DAMPING, DIRECTIONS, DT
from marl_pool.tokens import Tokens

FORESIGHT = 12
"""Steps for which an evading agent imagines each choice."""


class PairingScript(ForceHeuristic):
    """Go to an entity that no other agent is to reach, by a dead-beat force.

    Agents and entities are paired anew in each step, the nearest pair first. All agents
    see the same set, so each of them finds the same pairs. An agent without an entity
    stays.
    """

    task: ClassVar[Task]
    goal: ClassVar[str] = "target"
    """Kind of the entities."""
    standoff: ClassVar[float] = 0.0
    """Distance from the entity to keep."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.acceleration = cls.task.force
        names = ("self", *(kind.name for kind in cls.task.kinds))
        cls.types = {name: number for number, name in enumerate(names)}

    types: ClassVar[dict[str, int]]
    """Number of each type."""

    def rounds(self, agents: Tensor, goals: Tensor) -> Tensor:
        """Return how many agents ``(*B,)`` an entity may have, of both numbers."""
        return torch.ones_like(agents)

    @override
    def force(self, tokens: Tokens) -> Tensor:
        # Ways from the observer, whose own token comes first.
        ways = tokens.features.clone()
        ways[..., 0, :] = 0
        types, there = tokens.types, ~tokens.padding
        is_agent = ((types == self.types["agent"]) | (types == 0)) & there
        is_goal = (types == self.types[self.goal]) & there
        away = ways[..., None, :, :2] - ways[..., :, None, :2]
        distance = torch.hypot(away[..., 0], away[..., 1])
        unfit = ~(is_agent[..., :, None] & is_goal[..., None, :])
        distance = distance.masked_fill(unfit, torch.inf)
        rounds = self.rounds(is_agent.sum(-1), is_goal.sum(-1))
        goal = torch.full_like(types[..., 0], -1)
        free = is_agent
        for number in range(int(rounds.max())):
            allowed = free & (number < rounds)[..., None]
            partner = nearest_pairs(
                distance.masked_fill(~allowed[..., :, None], torch.inf)
            )
            goal = torch.where(goal < 0, partner[..., 0], goal)
            free = free & (partner < 0)
        index = goal.clamp(min=0)[..., None, None].expand(*goal.shape, 1, 4)
        target = ways.gather(-2, index)[..., 0, :]
        place = target[..., :2] - self.standoff * normalize(target[..., :2], dim=-1)
        velocity = target[..., 2:]
        has_goal = (goal >= 0)[..., None]
        # Landmarks rest, so a way's velocity is the agent's own, negated.
        force = MASS * (place + LEAD * velocity) / DT**2
        return torch.where(has_goal, force, 0)


class SpreadScript(PairingScript):
    """Cover the targets, each by one agent."""

    task = mpev2.SPREAD


class AdversaryScript(PairingScript):
    """Cover the targets, each by one agent."""

    task = mpev2.ADVERSARY


class HuntScript(PairingScript):
    """Hunt the adversaries, each by one agent."""

    task, goal = mpev2.HUNT, "adversary"


class GuardScript(PairingScript):
    """Guard the targets, each by as many agents as count, from a small distance."""

    task, standoff = mpev2.GUARD, 0.14

    @override
    def rounds(self, agents: Tensor, goals: Tensor) -> Tensor:
        return (agents + goals - 1) // goals.clamp(min=1)


class EvadingScript(ForceHeuristic):
    """Of the five choices, take the one that leads farthest from the adversaries.

    Each is imagined for twelve steps, in which the adversaries rest. A choice that ends
    outside the square loses against all that end inside.
    """

    task: ClassVar[Task]
    nearest: ClassVar[bool]
    """True to measure the distance to the nearest adversary, False for the mean."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.acceleration = cls.task.force

    @override
    def force(self, tokens: Tokens) -> Tensor:
        own = tokens.features[..., 0, :]
        pushes = torch.tensor(DIRECTIONS).to(own) * self.acceleration
        shift = torch.zeros_like(own[..., None, :2]) + 0 * pushes
        velocity = own[..., None, 2:].expand_as(shift)
        for _ in range(FORESIGHT):
            shift = shift + DT * velocity
            velocity = (1 - DAMPING) * velocity + DT / MASS * pushes
        missing = (tokens.types != 2) | tokens.padding
        away = tokens.features[..., None, :, :2] - shift[..., None, :]
        distance = torch.hypot(away[..., 0], away[..., 1])
        if self.nearest:
            score = distance.masked_fill(missing[..., None, :], torch.inf).amin(-1)
        else:
            count = (~missing).sum(-1).clamp(min=1)
            score = distance.masked_fill(missing[..., None, :], 0).sum(-1)
            score = score / count[..., None]
        beyond = (own[..., None, :2] + shift).abs().amax(-1) - self.task.boundary
        score = score - 1e3 * beyond.clamp(min=0)
        return pushes[score.argmax(-1)]


class TagScript(EvadingScript):
    """Keep away from the nearest adversary."""

    task, nearest = mpev2.TAG, True


class RepelScript(EvadingScript):
    """Keep away from the adversaries."""

    task, nearest = mpev2.REPEL, False
