"""Simple world with communication: a leader directs predators, prey eat and hide."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import BLUE, GREEN, OBSTACLE, PURPLE, VERMILION
from marl_pool.envs.particles.physics import Entities, distances
from marl_pool.envs.particles.simple_tag import boundary_penalty
from marl_pool.envs.particles.speaking import (
    MOTION,
    VELOCITY,
    SpeakingEnv,
    SpeakingOptions,
)
from marl_pool.options.types import Episodes, Size

PREDATORS = ("leadadversary", "adversary")
FOREST = (150, 200, 150)
FEATURES = 3
"""Marks of all groups: inside a forest, and the observer's own position."""
SIZES = {"predator": 0.075, "agent": 0.045, "food": 0.03, "forest": 0.3}


class SimpleWorldComm(SpeakingEnv):
    r"""A leader that sees into forests directs predators; prey eat and hide there.

    A predator, the leader included, gets 5 for each touch of any predator and prey,
    minus a tenth of its distance to the nearest prey. Prey get

    .. math:: r = 2 f - 5 n - 2 b(|x|) - 2 b(|y|) - 0.05\, d

    with n the number of predators that touch it, f of food, d the distance to the
    nearest food and b the penalty near the border of `SimpleTag`. Predators, prey and
    obstacles collide; food and forests do not.

    A token has position and velocity relative to the observer; for a forest 1 if
    the observer is in it and -1 else; for the observer its own position in the plane;
    and, at the leader's token of the predators' sets, the leader's message of the last
    step. The velocities of other predators are zero. So are position and velocity of an
    agent that is hidden: unless observer and agent share a forest, or neither is in
    any, only the leader sees it. The order is self, obstacles, food, forests, other
    agents. Agents start at rest in [-1, 1] along each axis, the others in [-0.9, 0.9].
    Episodes end by truncation only.

    Source: ``simple_world_comm_v3`` of `mpe2 <https://mpe2.farama.org>`_ (`Lowe et al.,
    2017 <https://arxiv.org/abs/1706.02275>`_), whose physics, starts, actions, rewards
    and names of groups these are.

    Args:
        num_agents: prey.
        num_adversaries: predators besides the leader.
        num_obstacles: obstacles.
        num_food: pieces of food, which stay when touched.
        num_forests: forests.
        num_words: words of the leader, the size of a message.
        continuous_actions: True for five numbers in [0, 1], of which the second to
            fifth push left, right, down and up, and for the leader one more for each
            word; False for one of five choices: no-op, left, right, down, up; the
            leader's are move + 5 word.
    """

    type_names = ("self", "obstacle", "food", "forest", *PREDATORS, "agent")

    def __init__(
        self,
        num_envs: Episodes,
        *,
        num_agents: Size = 2,
        num_adversaries: Size = 3,
        num_obstacles: Size = 1,
        num_food: Size = 2,
        num_forests: Size = 2,
        num_words: Size = 4,
        **common: Unpack[SpeakingOptions],
    ) -> None:
        leader = Entities(
            "leadadversary",
            1,
            VERMILION,
            SIZES["predator"],
            collide=True,
            acceleration=3.0,
            max_speed=1.0,
        )
        unseen = dict.fromkeys(PREDATORS, VELOCITY)
        super().__init__(
            num_envs,
            entities=(
                leader,
                replace(leader, kind="adversary", count=num_adversaries, color=PURPLE),
                Entities(
                    "agent",
                    num_agents,
                    GREEN,
                    SIZES["agent"],
                    collide=True,
                    acceleration=4.0,
                    max_speed=1.3,
                ),
                Entities(
                    "obstacle",
                    num_obstacles,
                    OBSTACLE,
                    0.2,
                    movable=False,
                    collide=True,
                ),
                Entities(
                    "food", num_food, BLUE, SIZES["food"], movable=False, on_top=True
                ),
                Entities("forest", num_forests, FOREST, SIZES["forest"], movable=False),
            ),
            learners=(*PREDATORS, "agent"),
            lone=("leadadversary",),
            marks={
                **dict.fromkeys(PREDATORS, FEATURES + num_words),
                "agent": FEATURES,
            },
            hidden=dict.fromkeys((*PREDATORS, "agent"), unseen),
            speaker="leadadversary",
            num_words=num_words,
            half_side=0.9,
            **common,
        )
        radii = [kind.size for kind in self.entities[: self.num_movable]]
        self._forest_reach = self._constant(radii)[:, None] + SIZES["forest"]

    @override
    def mark(self, group: str, features: Tensor) -> None:
        marks, agents = features[..., MOTION:], self._slices[group]
        forests = self._slices["forest"]
        # Tokens: self, then the immovable entities in their order.
        first = 1 + forests.start - self.num_movable
        inside = self._in_forests()
        sight = 2 * inside[:, agents].to(self.dtype) - 1
        marks[:, :, first : first + forests.stop - forests.start, 0] = sight
        marks[:, :, 0, 1:FEATURES] = self._positions[group]
        # The other agents are last; those in a forest are seen from inside it.
        neighbors = self._order[group][:, 1 + len(self.entities) - self.num_movable :]
        if group != "leadadversary":
            visible = self._sees(inside)[:, agents].gather(
                2, neighbors.expand(self.num_envs, -1, -1)
            )
            features[:, :, -neighbors.shape[1] :, :MOTION] *= visible[..., None]
        if group in PREDATORS:
            # The leader's token is the first: its own, or the first of the others.
            place = 0 if group == "leadadversary" else -neighbors.shape[1]
            marks[:, :, place, FEATURES:] = self.words

    def _in_forests(self) -> Tensor:
        """Return which agents are in which forests, ``(num_envs, agents, forests)``."""
        inside = distances(self._position, self._positions["forest"])
        return self.fill_absent(inside < self._forest_reach, "forest", 2, False)

    def _sees(self, inside: Tensor) -> Tensor:
        """Return which agents see which, ``(num_envs, agents, agents)`` bool."""
        hidden = inside.any(2)
        # Both are in the same forest.
        shared = (inside[:, :, None] & inside[:, None]).any(3)
        return shared | ~(hidden[:, :, None] | hidden[:, None])

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        moves = {**actions, "leadadversary": self.hear(actions["leadadversary"])}
        forces = [self._steering[name].forces(moves[name]) for name in self.groups]
        self.integrate(torch.cat(forces, 1))
        prey, food = self._positions["agent"], self._positions["food"]
        hunters = slice(0, self._slices["agent"].start)
        chase = distances(self._position[:, hunters], prey)
        chase = self.fill_absent(chase, "agent", 2, torch.inf)
        meal = self.fill_absent(distances(prey, food), "food", 2, torch.inf)
        caught = chase < SIZES["predator"] + SIZES["agent"]
        caught = self.fill_absent(caught, hunters, 1, False)
        # Every predator gains by the touches of all.
        touches = caught.sum((1, 2), dtype=self.dtype)[:, None]
        hunting = 5 * touches - 0.1 * chase.amin(2)
        eaten = (meal < SIZES["agent"] + SIZES["food"]).sum(2, dtype=self.dtype)
        reward = 2 * eaten - 5 * caught.sum(1, dtype=self.dtype)
        reward -= 2 * boundary_penalty(prey) + 0.05 * meal.amin(2)
        rewards = {"leadadversary": hunting[:, :1], "adversary": hunting[:, 1:]}
        return self.earned(**rewards, agent=reward), self._never
