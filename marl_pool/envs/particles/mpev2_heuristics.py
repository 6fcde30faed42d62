"""Scripted agents of MPEv2's tasks: anchors of docs/mpev2.md's table, not optima."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles import mpev2_tasks
from marl_pool.envs.particles.heuristics import (
    ForceHeuristic,
    is_observer,
    observer_features,
)
from marl_pool.envs.particles.mpev2 import MASS, MPEv2
from marl_pool.envs.particles.physics import DAMPING, DIRECTIONS, DT, dead_beat
from marl_pool.tokens import Tokens, take_features

FORESIGHT = 12
"""Steps for which an evading agent simulates each choice."""


FAR = 100.0
"""Cost of leaving an agent without an entity, above all distances."""


class PairingHeuristic(ForceHeuristic):
    """Go to an entity that is assigned to no other agent, by a dead-beat force.

    Agents and entities are paired anew in each step, with the least sum of distances.
    All agents see the same set, so each of them finds the same pairs. An agent without
    one goes to the nearest.
    """

    task: ClassVar[type[MPEv2]]
    goal: ClassVar[str] = "target"
    """Kind of the entities."""
    standoff: ClassVar[float] = 0.0
    """Distance from the entity to keep."""
    most_rounds: ClassVar[int] = 1
    """Most agents that an entity may have."""

    def __init__(self, group: AgentGroup) -> None:
        super().__init__(group)
        self.actions = group.actions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.acceleration = cls.task.force
        slots = {
            kind.name: max(count.high + count.arrivals for count in kind.counts)
            for kind in cls.task.kinds
        }
        cls.most = slots["agent"], slots[cls.goal]

    most: ClassVar[tuple[int, int]]
    """Most agents and entities that are paired."""

    def rounds(self, agents: Tensor, goals: Tensor) -> Tensor:
        """Return how many agents ``(*B,)`` an entity may have, given both numbers."""
        return torch.ones_like(agents)

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        if not self.actions.selects:
            return super().choose(tokens)
        goal, has_goal = self.pair(tokens)
        choice = torch.where(has_goal, self.actions.num_fixed + goal, 0)
        return choice, choice[..., None].to(tokens.features)

    @override
    def force(self, tokens: Tokens) -> Tensor:
        goal, has_goal = self.pair(tokens)
        index = goal[..., None, None].expand(*goal.shape, 1, 4)
        target = _relative(tokens).gather(-2, index)[..., 0, :]
        place, velocity = target[..., :2], target[..., 2:]
        place = place - self.standoff * normalize(place, dim=-1)
        force = dead_beat(torch.cat((place, velocity), -1), MASS)
        return torch.where(has_goal[..., None], force, 0)

    def pair(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the slot ``(*B,)`` of each observer's entity, and if there is one."""
        relative = _relative(tokens)
        types, present = tokens.types, ~tokens.padding
        is_self = is_observer(tokens)
        is_agent = ((types == self.types["agent"]) & present) | is_self
        is_goal = (types == self.types[self.goal]) & present
        # The observer is the first of the agents: 2 ranks before 1, and others have 0.
        ranks = (is_agent.byte() + is_self.byte(), is_goal.byte())
        agents, goals = (
            rank.argsort(dim=-1, descending=True, stable=True)[..., :most]
            for rank, most in zip(ranks, self.most, strict=True)
        )
        goal_places, agent_places = (
            take_features(relative, slots)[..., :2] for slots in (goals, agents)
        )
        away = goal_places[..., None, :, :] - agent_places[..., None, :]
        distance = torch.hypot(away[..., 0], away[..., 1])
        unfit = ~(
            is_agent.gather(-1, agents)[..., :, None]
            & is_goal.gather(-1, goals)[..., None, :]
        )
        distance = distance.masked_fill(unfit, torch.inf)
        rounds = self.rounds(is_agent.sum(-1), is_goal.sum(-1))
        nearest = goals.gather(-1, distance[..., 0, :].argmin(-1, keepdim=True))[..., 0]
        goal = torch.full_like(types[..., 0], -1)
        # Pair the agents that are still free in each round, as long as entities may
        # have more of them.
        for number in range(self.most_rounds):
            distance = distance.masked_fill(
                (number >= rounds)[..., None, None], torch.inf
            )
            partner = least_pairs(distance)
            column = partner[..., :1]
            slot = goals.gather(-1, column.clamp(min=0)).masked_fill(column < 0, -1)
            goal = torch.maximum(goal, slot[..., 0])
            distance = distance.masked_fill((partner >= 0)[..., None], torch.inf)
        return torch.where(goal < 0, nearest, goal), is_goal.any(-1)


def _relative(tokens: Tokens) -> Tensor:
    """Return the features, with 0 for the observer's own token."""
    return tokens.features.masked_fill(is_observer(tokens)[..., None], 0)


def least_pairs(distance: Tensor) -> Tensor:
    """Pair as many rows and columns as possible, with the least sum of distances.

    It is exact, by dynamic programming over the sets of columns (Held and Karp, 1962,
    https://doi.org/10.1137/0110015), and takes time in proportion to 2ᵐ.

    Args:
        distance: ``(*B, n, m)``, infinity for a pair that is not allowed.

    Returns:
        The column of each row, ``(*B, n)`` int64, -1 for a row without one.
    """
    num_rows, num_columns = distance.shape[-2:]
    device, batch = distance.device, distance.shape[:-2]
    # A pair that is not allowed costs as much as none, and is removed at the end.
    cost = distance.clamp(max=FAR).view(-1, num_rows, num_columns)
    bits = 1 << torch.arange(num_columns, device=device)
    subsets = torch.arange(1 << num_columns, device=device)
    has_column = (subsets[:, None] & bits) > 0
    before = subsets[:, None] ^ bits
    # The least cost of the rows so far, for each set of columns that they use.
    least = cost.new_full((len(cost), len(subsets)), torch.inf)
    least[:, 0] = 0
    decisions = []
    for row in range(num_rows):
        # Option 0 is no column for this row; option j adds column j - 1 to a set that
        # lacks it.
        pairs = least[:, before] + cost[:, row, None]
        pairs = pairs.masked_fill(~has_column, torch.inf)
        options = torch.cat((least[..., None] + FAR, pairs), -1)
        least, decision = options.min(-1)
        decisions.append(decision)
    columns = least.argmin(-1, keepdim=True)
    partner = []
    # The bits by which an option changes the set of columns; 0 for no column.
    steps = torch.cat((bits.new_zeros(1), bits))
    for decision in reversed(decisions):
        option = decision.gather(1, columns)
        partner.append(option - 1)
        columns = columns ^ steps[option]
    pairs = torch.cat(partner[::-1], 1).view(*batch, num_rows)
    length = distance.gather(-1, pairs.clamp(min=0)[..., None])[..., 0]
    return pairs.masked_fill(~length.isfinite(), -1)


class MPEv2SpreadHeuristic(PairingHeuristic):
    """Cover the targets, each by one agent."""

    task = mpev2_tasks.Spread


class MPEv2AdversaryHeuristic(PairingHeuristic):
    """Cover the targets, each by one agent."""

    task = mpev2_tasks.Adversary


class MPEv2HuntHeuristic(PairingHeuristic):
    """Hunt the adversaries, each by one agent."""

    task, goal = mpev2_tasks.Hunt, "adversary"


class MPEv2GuardHeuristic(PairingHeuristic):
    """Guard each target by as many agents as the reward counts, at a small distance."""

    task, standoff, most_rounds = mpev2_tasks.Guard, 0.14, 4

    @override
    def rounds(self, agents: Tensor, goals: Tensor) -> Tensor:
        return (agents + goals - 1) // goals.clamp(min=1)


class EvadingHeuristic(ForceHeuristic):
    """Take the one of five choices that leads farthest from the adversaries.

    Each choice is simulated for twelve steps, in which the adversaries rest. One that
    ends outside the square loses against all that end inside.
    """

    task: ClassVar[type[MPEv2]]
    nearest: ClassVar[bool]
    """True to measure the distance to the nearest adversary, False for the mean."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.acceleration = cls.task.force

    @override
    def force(self, tokens: Tokens) -> Tensor:
        observer = observer_features(tokens)
        pushes = observer.new_tensor(DIRECTIONS) * self.acceleration
        # Zeros for each of the choices.
        shift = torch.zeros_like(observer[..., None, :2]) + 0 * pushes
        velocity = observer[..., None, 2:].expand_as(shift)
        for _ in range(FORESIGHT):
            shift = shift + DT * velocity
            velocity = (1 - DAMPING) * velocity + DT / MASS * pushes
        missing = (tokens.types != self.types["adversary"]) | tokens.padding
        away = tokens.features[..., None, :, :2] - shift[..., None, :]
        distance = torch.hypot(away[..., 0], away[..., 1])
        if self.nearest:
            score = distance.masked_fill(missing[..., None, :], torch.inf).amin(-1)
        else:
            count = (~missing).sum(-1).clamp(min=1)
            score = distance.masked_fill(missing[..., None, :], 0).sum(-1)
            score = score / count[..., None]
        beyond = (observer[..., None, :2] + shift).abs().amax(-1) - self.task.boundary
        score = score - 1e3 * beyond.clamp(min=0)
        return pushes[score.argmax(-1)]


class MPEv2TagHeuristic(EvadingHeuristic):
    """Keep away from the nearest adversary."""

    task, nearest = mpev2_tasks.Tag, True


class MPEv2RepelHeuristic(EvadingHeuristic):
    """Keep away from the adversaries."""

    task, nearest = mpev2_tasks.Repel, False
