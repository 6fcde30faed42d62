"""The six tasks of MPEv2: teams that meet more entities than in training."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import (
    BLUE,
    GREEN,
    OBSTACLE,
    PURPLE,
    VERMILION,
    Color,
)
from marl_pool.envs.particles.physics import (
    DAMPING,
    DT,
    Entities,
    ParticleEnv,
    ParticleOptions,
    dead_beat,
    distances,
)
from marl_pool.envs.particles.population import NEVER, PLACES, between
from marl_pool.options.types import Episodes, NonNegativeInt
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import may_read
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

MASS = 2.0
MARGIN = 10
"""Steps at both ends of an episode in which nothing arrives in a test."""
TRIES = 100
"""Places that are tried for a disc at the start, until it touches no earlier one."""
BORDER = 2.0
"""Distance from the origin along an axis at which the penalty for leaving is 1."""
FLIGHT = 1.0
"""Distance to the nearest agent below which an adversary flees."""
GOAL_STEPS, GOAL_TRIES = 51, 50
"""Steps between goals of wandering targets, and the places that are tried for each."""
GOAL_SHIFT, GOAL_BOUND, GOAL_DISTANCE = 0.75, 1.95, 0.2
"""Largest shift of a goal along an axis, its bound, and the distance between goals."""

Domain = Literal[0, 1, 2]


class Count(NamedTuple):
    """Number of entities of a kind in an episode."""

    low: int
    high: int
    """At the start: uniform from ``low`` to this number."""
    arrivals: int
    """Later: uniform from 1 to this number; none if it is 0."""


class Kind(NamedTuple):
    """A kind of entity of a task; lengths are in units of the task's boundary."""

    name: str
    color: Color
    counts: tuple[Count, Count, Count]
    """For each domain."""
    start: Callable[[Tensor], Tensor]
    """Starts ``(*B, 2)`` from uniform numbers ``(*B, 2)``."""
    arrival: tuple[str, float] = ("edge", 0.98)
    """Where newcomers appear: a key of `PLACES`, and its size."""
    script: Callable[[Any, str], Tensor] | None = None
    """Forces ``(num_envs, n, 2)`` of scripted entities of a task, by the kind's name;
    None for the others."""
    random_numbers: int = 0
    """Random numbers that the script of an entity uses in a step."""


class MPEv2Options(ParticleOptions, total=False):
    """Options that the tasks pass on to `MPEv2`."""

    domain: Domain
    margin: NonNegativeInt | None
    continuous_actions: bool


class MPEv2(ParticleEnv):
    r"""A task of MPEv2, whose rules are the class's attributes and `reward`.

    An agent observes every entity that is there as a token: position and velocity
    relative to its own, and type. In its own token both are absolute. The order is
    self, landmarks, the other movable ones. Everything has a mass of 2, so an agent's
    terminal speed is a fifth of its force. Scripted entities push with a force of at
    most 1. Each agent gets the reward of the team, from the positions after a step; an
    entity that arrives in that step does not count. In formulas, gap is the distance of
    two centres less both radii, and two entities touch if it is at most 0. There are no
    walls.

    Entities of ``env.arrivals`` join the task's own, which stay the same. By
    ``env.departures``, entities that were there at the start leave. The first of each
    kind stays, so fewer leave than a rule says if an episode has too few.

    Source: `FlickerFusion, Koh et al., ICLR 2025 <https://arxiv.org/abs/2410.15876>`_,
    and the published environments. Differences from the latter:

    - Episodes end by truncation; there the end counted as a final state.
    - Numbers of entities are uniform in training; there, methods that hide entities
      trained with more of them than the others did.
    - An observation has no last action, and positions are relative; there, positions
      were absolute.
    - Colliding discs do not jitter; there, one of each pair moved by up to 1e-9 a step.
    - Each goal of wandering targets has 50 tries, and may overlap others after them;
      there, all goals shared these tries, and running out of them was an error.

    Args:
        domain: numbers of entities: 0 as in training, 1 for more agents, 2 for more of
            the other kinds.
        margin: steps at both ends of an episode in which nothing arrives; None for 0 in
            domain 0, and for 10, as in published tests, in the others.

    Raises:
        InputError: too few steps for the margin.
    """

    boundary: ClassVar[float]
    """Half the side of the square in which entities start."""
    force: ClassVar[float]
    """Force of an agent's choice."""
    kinds: ClassVar[tuple[Kind, ...]]
    """The kinds of entities: first the agents, last the landmarks."""
    size: ClassVar[float] = 0.05
    """Radius of every disc."""
    contacts: ClassVar[bool] = True
    """True if all entities collide."""
    newcomers_collide: ClassVar[bool] = False
    """True if at least the agents that arrive collide."""
    spacing: ClassVar[Literal["all", "kinds", "no"]] = "all"
    """``"all"`` if no starts overlap, ``"kinds"`` if none of the same kind do, ``"no"``
    if any may."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        domain: Domain = 0,
        margin: NonNegativeInt | None = None,
        continuous_actions: bool = False,
        max_steps: Episodes,
        **common: Unpack[ParticleOptions],
    ) -> None:
        self.domain = domain
        self.margin = (MARGIN if domain else 0) if margin is None else margin
        if max_steps <= 2 * self.margin:
            raise InputError(
                f"env.max_steps: expected more than twice env.margin={self.margin}, "
                f"got {max_steps}"
            )
        self._scripted = [kind for kind in self.kinds if kind.script]
        super().__init__(
            num_envs,
            entities=[part for kind in self.kinds for part in self._entities(kind)],
            learners=("agent",),
            continuous_actions=continuous_actions,
            # Show a margin, since nothing stops at the boundary.
            extent=self.boundary + 0.25,
            max_steps=max_steps,
            random_numbers={kind.name: kind.random_numbers for kind in self.kinds},
            changing=True,
            **common,
        )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = (kind.name for kind in cls.kinds)
        cls.type_names = ("self", *names)

    def _entities(self, kind: Kind) -> list[Entities]:
        """Return the initial entities, and the newcomers."""
        _, high, arrivals = kind.counts[self.domain]
        is_agent = kind.name == "agent"
        return [
            Entities(
                kind.name,
                count,
                kind.color,
                self.size,
                movable=is_agent or kind.script is not None,
                collide=self.contacts or (self.newcomers_collide and is_agent and new),
                max_speed=1.3 if is_agent else 1.0,
                mass=MASS,
                acceleration=self.force if is_agent else 0.0,
                signal=kind.name != "decoy",
                late=new,
            )
            for new, count in ((False, high), (True, arrivals))
        ]

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        start = 0
        state = torch.zeros_like(self.state[rows])
        lives = torch.full_like(self._lives[rows], NEVER)
        groups: list[tuple[list[int], Tensor]] = []
        for kind in self.kinds:
            low, high, arrivals = kind.counts[self.domain]
            first = self._slices[kind.name].start
            slots = range(first, first + high)
            newcomers = range(slots.stop, slots.stop + arrivals)
            # Numbers and times, then places of newcomers, then of the others.
            parts = [2, arrivals, 2 * arrivals, 2 * TRIES * high]
            numbers = self.sample_uniform(keys, sum(parts), start)
            # All episodes use equally many numbers, whether or not their slots are
            # taken.
            start += sum(parts)
            counts, times, edges, tries = numbers.split(parts, 1)
            begins = between(counts[:, :1], low, high)
            number = between(counts[:, 1:], min(arrivals, 1), arrivals)
            steps = between(times, self.margin, self.max_steps - 1 - self.margin)
            # The clock is 1 after the first step, so an entity due at 0 never comes.
            steps = steps.masked_fill(steps == 0, NEVER)
            indices = torch.arange(max(high, arrivals), device=self.device)
            lives[:, slots, 0] = torch.where(indices[:high] < begins, 0, NEVER)
            due = indices[:arrivals] < number
            lives[:, newcomers, 0] = torch.where(due, steps, NEVER)
            where, size = kind.arrival
            # Points of radius 1; `size` is in units of the boundary.
            points = PLACES[where](edges.view(len(rows), arrivals, 2))
            state[:, newcomers, :2] = size * self.boundary * points
            places = kind.start(tries.view(len(rows), high, TRIES, 2)) * self.boundary
            groups.append(([*slots], places))
        if self.spacing == "all":
            all_slots = [slot for slots, _ in groups for slot in slots]
            all_places = torch.cat([places for _, places in groups], 1)
            groups = [(all_slots, all_places)]
        # At reach 0 only coinciding places touch.
        reach = 0 if self.spacing == "no" else 2 * self.size
        for group, candidates in groups:
            # `lives` tells which of the discs an episode has.
            used = lives[:, group, 0] == 0
            state[:, group, :2] = spaced(candidates, used, reach)
        self.state[rows], self._lives[rows] = state, lives

    @property
    def _lives(self) -> Tensor:
        assert self.lives is not None
        return self.lives

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        forces = [self.agent_forces(actions["agent"])]
        for kind in self._scripted:
            assert kind.script is not None
            forces.append(kind.script(self, kind.name))
        self.integrate(torch.cat(forces, 1))
        reward = self.reward()[:, None]
        shared = reward.expand(-1, self.groups["agent"].num_agents)
        return self.earned(agent=shared), self._never

    @abstractmethod
    def reward(self) -> Tensor:
        """Return the team's rewards ``(num_envs,)`` after a step."""

    def agent_forces(self, actions: Tensor) -> Tensor:
        """Convert the agents' actions to forces ``(num_envs, agents, 2)``."""
        return self._steering["agent"].forces(actions)

    @override
    def observe(self) -> dict[str, Tokens]:
        observed = super().observe()["agent"]
        observed.features[:, :, 0] = self.state[:, self._slices["agent"]]
        return {"agent": observed}

    @override
    def perceived_places(
        self, tokens: Tokens, index: int, *, group: str, agent: int
    ) -> Tensor:
        is_self = (tokens.types == SELF_TYPE)[:, None]
        # The observer's own token holds an absolute position.
        features = tokens.features
        shift = torch.where(is_self, self.state[index, agent].to(features), 0)
        relative = tokens._replace(features=features - shift)
        return super().perceived_places(relative, index, group=group, agent=agent)

    def distances(self, kind: str, other: str) -> Tensor:
        """Return distances ``(num_envs, n, m)``, infinite to absent entities."""
        distance = distances(self._positions[kind], self._positions[other])
        return self.fill_absent(distance, other, 2, torch.inf)

    def gaps(self, kind: str, other: str) -> Tensor:
        """Return distances from edge to edge, negative where discs overlap."""
        return self.distances(kind, other) - 2 * self.size

    def nearest(self, kind: str, other: str) -> Tensor:
        """Return each entity's smallest gap to another kind, 0 for absent entities."""
        return self.fill_absent(self.gaps(kind, other).amin(2), kind, 1, 0)

    def count(self, kind: str) -> Tensor:
        """Return how many of a kind are present, ``(num_envs,)`` int64."""
        return self.present[:, self._slices[kind]].sum(1)

    def velocity(self, kind: str) -> Tensor:
        """Return the velocities of a kind, ``(num_envs, n, 2)``."""
        return self.state[:, self._slices[kind], 2:]

    def penalty(self) -> Tensor:
        """Return the sum of the agents' penalties for leaving the square."""
        reach = self._positions["agent"].abs().amax(-1)
        # The minus applies last: the limit is on the size of the penalty.
        penalty = -torch.pow(5.0, reach - BORDER).clamp(max=25)
        penalty = torch.where(reach > self.boundary, penalty, 0)
        return self.fill_absent(penalty, "agent", 1, 0).sum(1)

    def touches(self, kind: str) -> Tensor:
        """Return the number of agents that touch each of a kind, ``(num_envs, n)``."""
        touching = self.gaps(kind, "agent") <= 0
        return self.fill_absent(touching, kind, 1, False).sum(2)


def spaced(candidates: Tensor, used: Tensor, reach: float) -> Tensor:
    """Choose each disc's first place that no earlier disc touches, or its last one.

    Args:
        candidates: ``(k, n, tries, 2)``.
        used: ``(k, n)`` bool, discs that the later ones must not touch.
        reach: distance up to which two touch.

    Returns:
        ``(k, n, 2)``.
    """
    rows = torch.arange(len(candidates), device=candidates.device)
    places: list[Tensor] = []
    for number, tries in enumerate(candidates.unbind(1)):
        free = torch.zeros_like(tries[..., 0], dtype=torch.bool)
        if number:
            away = tries[:, :, None] - torch.stack(places, 1)[:, None]
            near = torch.hypot(away[..., 0], away[..., 1]) <= reach
            free = ~(near & used[:, None, :number]).any(-1)
        else:
            free = ~free
        # The last place is taken where no place is free.
        free[:, -1] = True
        # `argmax` returns the first of the free places; it does not take bool.
        places.append(tries[rows, free.byte().argmax(1)])
    return torch.stack(places, 1)


# Starts


def box(side: float) -> Callable[[Tensor], Tensor]:
    """Return a map of uniform numbers to starts in a square of this half side."""
    return partial(_in_square, side=side)


def _in_square(numbers: Tensor, *, side: float) -> Tensor:
    return (2 * numbers - 1) * side


def corner(numbers: Tensor) -> Tensor:
    """Return starts in the upper left corner, a fifth of the square's side long."""
    place = 0.6 + 0.4 * numbers
    return torch.stack((-place[..., 0], place[..., 1]), -1)


def outside(numbers: Tensor) -> Tensor:
    """Return starts whose coordinates are both beyond a quarter of the half side."""
    signed = 2 * numbers - 1
    return signed.sign() * (0.25 + 0.75 * signed.abs())


# Scripts


def drive(displacement: Tensor, velocity: Tensor) -> Tensor:
    r"""Return forces of length at most 1 that aim at a displacement d in one step.

    .. math:: F = d / dt - (2 - damping)\,v, \quad \lVert F \rVert \le 1
    """
    force = displacement / DT - (2 - DAMPING) * velocity
    length = torch.linalg.vector_norm(force, dim=-1, keepdim=True)
    return torch.where(length > 1, normalize(force, dim=-1), force)


def _nearest_agent(env: MPEv2, kind: str) -> tuple[Tensor, Tensor]:
    """Return each entity's way to the nearest agent, and the distance."""
    distance, index = env.distances(kind, "agent").min(2, keepdim=True)
    places = env._positions["agent"].gather(1, index.expand(-1, -1, 2))
    return places - env._positions[kind], distance


def chase(env: MPEv2, kind: str) -> Tensor:
    """Chase the nearest agent."""
    return drive(_nearest_agent(env, kind)[0], env.velocity(kind))


def flee(env: MPEv2, kind: str) -> Tensor:
    """Flee a nearby agent, else move at random, and stay inside the boundary."""
    way, distance = _nearest_agent(env, kind)
    random_way = 2 * env.dynamics.next().view(way.shape) - 1
    way = torch.where(distance < FLIGHT, -way, random_way)
    place, velocity = env._positions[kind], env.velocity(kind)
    following, side = place + DT * velocity, env.boundary
    # Along an axis on which this step would leave the square, aim at the edge.
    edge = following.sign() * side
    return drive(torch.where(following.abs() > side, edge - place, way), velocity)


def follow(env: MPEv2, kind: str) -> Tensor:
    """Go to the landmark with the least sum of distances to the agents."""
    sums = [
        # Absent landmarks are infinitely far from all; absent agents add nothing.
        env.fill_absent(env.distances("agent", name), "agent", 1, 0).sum(1)
        for name in ("target", "decoy")
    ]
    goal = torch.cat(sums, 1).argmin(1)[:, None, None].expand(-1, 1, 2)
    landmarks = torch.cat((env._positions["target"], env._positions["decoy"]), 1)
    places = landmarks.gather(1, goal)
    return drive(places - env._positions[kind], env.velocity(kind))


def wander(env: "Guard", kind: str) -> Tensor:
    """Go to the goal, or stay without one."""
    return drive(env.way_to_goals(), env.velocity(kind))


# Tasks

FEW, MANY = Count(1, 3, 1), Count(5, 5, 0)
MORE = Count(5, 5, 2)
AGENTS, OTHERS = (FEW, MORE, MANY), (FEW, MANY, MORE)
LANDMARKS = (Count(1, 2, 1),) * 3


class Spread(MPEv2):
    r"""MPEv2's spread: agents cover targets, while more of both arrive.

    The reward of the team is the sum over targets of the negative gap between the
    target and the nearest agent; a gap is the distance of the centres less both radii.

    Targets rest. An agent's force is 1.5. Agents that arrive collide with each other;
    nothing else does.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 1.0
    force = 1.5
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1)),
        Kind("target", OBSTACLE, OTHERS, box(1), ("disc", 0.8)),
    )
    size = 0.04
    contacts = False
    newcomers_collide = True
    spacing = "kinds"

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 100,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return -self.nearest("target", "agent").sum(1)


class Tag(MPEv2):
    r"""Agents evade adversaries that chase the nearest one, and stay in the square.

    The reward of the team after a step is

    .. math:: r = \sum_a out(a) - 2\,\#\{(v, a): v \text{ touches } a\}, \quad
        out(a) = -\min(5^{\max(|x_a|, |y_a|) - 2}, 25)

    over agents a and adversaries v, where out is 0 within the square of half side 2.
    Agents start in the middle, adversaries in the upper left corner; newcomers appear
    at the edge. An agent's force is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 2.0
    force = 4.0
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1 / 4)),
        Kind("adversary", PURPLE, OTHERS, corner, script=chase),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return self.penalty() - 2 * self.touches("adversary").sum(1)


class Guard(MPEv2):
    r"""Agents guard wandering targets, several agents each, without touching them.

    The reward of the team after a step is

    .. math:: r = -\sum_t \Bigl[ \sum_{a \in N_i(t)} gap(a, t)
        + 5\,\#\{a: a \text{ touches } t\} \Bigr]

    over targets t, with N the i agents nearest to it and i the number of agents per
    target, rounded up. A target goes to a goal near it, which is drawn every 51 steps;
    one that arrives rests until the next draw. An agent's force is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    state_names = ("state", "goal_places")
    boundary = 2.0
    force = 4.0
    kinds = (
        Kind("agent", GREEN, (FEW, Count(5, 5, 3), MANY), box(1)),
        Kind(
            "target",
            BLUE,
            (Count(1, 2, 1), Count(4, 4, 0), Count(4, 4, 2)),
            box(1 / 2),
            script=wander,
        ),
    )

    goal_places: Tensor
    """``(num_envs, targets, 2)``: where each target goes, valid from the first draw
    after it came."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)
        self.goal_places = torch.zeros_like(self._positions["target"])

    @override
    def reward(self) -> Tensor:
        gaps = self.gaps("target", "agent").sort(2).values
        agents, targets = self.count("agent"), self.count("target")
        # The number of guards of each target, rounded up.
        guards = ((agents + targets - 1) // targets)[:, None, None]
        counts = torch.arange(gaps.shape[2], device=gaps.device) < guards
        distance = torch.where(counts, gaps, 0).sum(2) + 5 * self.touches("target")
        return -self.fill_absent(distance, "target", 1, 0).sum(1)

    def _has_goal(self) -> Tensor:
        """Return ``(num_envs, targets)`` bool."""
        # Goals are drawn at step 1 and every `GOAL_STEPS` steps after it.
        last_draw = self.steps - (self.steps - 1) % GOAL_STEPS
        targets = self._slices["target"]
        began = self._lives[:, targets, 0] < last_draw[:, None]
        return began & self.present[:, targets]

    def way_to_goals(self) -> Tensor:
        """Draw goals where they are due, and return the ways ``(num_envs, n, 2)``."""
        draws = self.steps % GOAL_STEPS == 1
        # Where no value may be read, always draw: `_draw_goals` keeps what is not due.
        if not may_read(draws) or draws.any():
            self._draw_goals(draws)
        return self._ways_now()

    def _ways_now(self) -> Tensor:
        way = self.goal_places - self._positions["target"]
        return torch.where(self._has_goal()[..., None], way, 0)

    def _draw_goals(self, where: Tensor) -> None:
        place = self._positions["target"]
        keys = stream_keys(self.seed, self.env_ids, self.episodes, Purpose.DYNAMICS, 1)
        count = place.shape[1] * GOAL_TRIES * 2
        # Each draw has a separate part of the stream.
        first = self.steps[:, None] // GOAL_STEPS * count
        numbers = uniform(keys, count, first).to(self.dtype)
        shift = GOAL_SHIFT * (2 * numbers.view(-1, place.shape[1], GOAL_TRIES, 2) - 1)
        tries = (place[:, :, None] + shift).clamp(-GOAL_BOUND, GOAL_BOUND)
        drawn = spaced(tries, self._has_goal(), GOAL_DISTANCE)
        self.goal_places = torch.where(where[:, None, None], drawn, self.goal_places)

    @override
    def state_features(self) -> Tensor:
        """Add the ways of entities to their goals, which no agent sees."""
        ways = torch.zeros_like(self.state[..., :2])
        ways[:, self._slices["target"]] = self._ways_now()
        return torch.cat((super().state_features(), ways), -1)

    @override
    def goals(self) -> Tensor:
        # Without a goal the mark lies under the first target.
        first = self._positions["target"][:, :1]
        return torch.where(self._has_goal()[..., None], self.goal_places, first)


class Adversary(MPEv2):
    r"""Agents cover targets among decoys, and lead adversaries away from them.

    The reward of the team after a step is

    .. math:: r = \sum_t \bigl[ \min_v gap(v, t) - \min_a gap(a, t) \bigr]

    over targets t, adversaries v and agents a. All adversaries go to the one target or
    decoy with the smallest sum of distances to the agents, so they follow the team.
    Nothing collides. An agent's force is 1.5.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 1.3
    force = 1.5
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1), ("edge", 1.0)),
        Kind("adversary", PURPLE, OTHERS, box(1), ("edge", 1.0), script=follow),
        Kind("target", OBSTACLE, LANDMARKS, box(1), ("square", 1.0)),
        Kind("decoy", VERMILION, LANDMARKS, box(1), ("square", 1.0)),
    )
    contacts = False
    spacing = "no"

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 150,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        near = self.nearest("target", "adversary") - self.nearest("target", "agent")
        return near.sum(1)


class Repel(MPEv2):
    r"""Agents keep away from adversaries that chase them, and stay in the square.

    The reward of the team after a step is

    .. math:: r = \sum_a out(a) + \sum_v \min_a gap(a, v), \quad
        out(a) = -\min(5^{\max(|x_a|, |y_a|) - 2}, 25)

    over agents a and adversaries v, where out is 0 within the square of half side 2.5,
    at whose edge it jumps to -2.24. Adversaries start in the middle. An agent's force
    is 4.

    docs/mpev2.md describes what all six tasks share.
    """

    boundary = 2.5
    force = 4.0
    kinds = (
        Kind("agent", GREEN, AGENTS, box(1)),
        Kind("adversary", PURPLE, OTHERS, box(0.2 / 2.5), script=chase),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        max_steps: Episodes = 150,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)

    @override
    def reward(self) -> Tensor:
        return self.penalty() + self.nearest("adversary", "agent").sum(1)


class Hunt(MPEv2):
    r"""Agents hunt adversaries that flee the nearest one.

    The reward of the team after a step is the negative mean over adversaries of the gap
    to the nearest agent, less the mean over agents of the gap to the nearest adversary.
    An adversary flees an agent that is nearer than 1, else moves at random, and turns
    back at the edge of the square of half side 2. An agent's force is 3.

    With ``choices="adversaries"``, which the published task lacks, an agent chooses
    none or an adversary that is there, and takes the one of its five directions that is
    nearest to the force by which `dead_beat` reaches it. This is a `Selection`, for
    ``policy.action=select``.

    docs/mpev2.md describes what all six tasks share.

    Args:
        choices: what an agent chooses: directions or adversaries.

    Raises:
        InputError: continuous actions where adversaries are chosen.
    """

    boundary = 2.0
    force = 3.0
    kinds = (
        Kind("agent", GREEN, AGENTS, outside),
        Kind("adversary", PURPLE, OTHERS, box(1 / 4), script=flee, random_numbers=2),
    )

    def __init__(
        self,
        num_envs: Episodes,
        *,
        choices: Literal["directions", "adversaries"] = "directions",
        max_steps: Episodes = 200,
        **options: Unpack[MPEv2Options],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **options)
        self._selection: SelectedTokens | None = None
        if choices == "directions":
            return
        if options.get("continuous_actions"):
            raise InputError(
                "env.continuous_actions: expected false with env.choices=adversaries, "
                "got true"
            )
        group = self.groups["agent"]
        space = Selection(1, group.tokens.num_tokens, ("adversary",))
        group = replace(group, action_space=space, has_action_masks=True)
        self.groups = {"agent": group}
        self._selection = SelectedTokens(group.tokens, group.actions)

    @override
    def reward(self) -> Tensor:
        hunted = self.nearest("adversary", "agent").sum(1) / self.count("adversary")
        return -hunted - self.nearest("agent", "adversary").sum(1) / self.count("agent")

    @override
    def observe(self) -> dict[str, Tokens]:
        tokens = super().observe()["agent"]
        if self._selection is not None:
            tokens = tokens._replace(action_mask=self._selection.options(tokens))
        return {"agent": tokens}

    @override
    def agent_forces(self, actions: Tensor) -> Tensor:
        if self._selection is None:
            return super().agent_forces(actions)
        # Entities by choice; the agent itself stands for the choice of none.
        order = pad(self._order["agent"], (1, 0))
        order[:, 0] = order[:, 1]
        entities = order.expand(self.num_envs, -1, -1).gather(2, actions[..., None])
        targets = self.state.gather(1, entities.expand(-1, -1, 4))
        away = targets - self.state[:, self._slices["agent"]]
        is_target = self.present.gather(1, entities[..., 0]) & (actions > 0)
        force = dead_beat(away, MASS) * is_target[..., None]
        steering = self._steering["agent"]
        return steering.push(steering.toward(force))
