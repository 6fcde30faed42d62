"""The base of MPEv2's tasks: teams that meet more entities than in training."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance
from marl_pool.envs.drawing.canvas import Color
from marl_pool.envs.particles.physics import (
    Entities,
    ParticleEnv,
    ParticleOptions,
    distances,
)
from marl_pool.envs.particles.population import NEVER, PLACES, between
from marl_pool.options.types import Episodes, NonNegativeInt
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError

MASS = 2.0
MARGIN = 10
"""Steps at both ends of an episode in which nothing arrives in a test."""
TRIES = 100
"""Places that are tried for a disc at the start, until it touches no earlier one."""
BORDER = 2.0
"""Distance from the origin along an axis at which the penalty for leaving is 1."""

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

    An agent observes each present entity as a token: its type, and its position and
    velocity relative to the agent. The agent's own token has the absolute ones. The
    order is self, landmarks, other movable entities. Everything has a mass of 2, so an
    agent's terminal speed is a fifth of its force. Scripted entities push with a force
    of at most 1. Each agent gets the team's reward, from the positions after a step; an
    entity that arrives in that step does not count. In formulas, gap is the distance
    between two centres less both radii, and two entities touch if it is at most 0.
    There are no walls.

    Entities of ``env.arrivals`` join the task's own, which stay the same. By
    ``env.departures``, initial entities leave. The first of each kind stays, so fewer
    leave than a rule says if an episode has too few.

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
    """Which discs must not overlap at the start: ``"all"``, those of the same kind
    (``"kinds"``), or none (``"no"``)."""

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

    def distances(self, kind: str, to_kind: str) -> Tensor:
        """Return distances ``(num_envs, n, m)`` between the entities of two kinds.

        They are infinite to absent entities.
        """
        distance = distances(self._positions[kind], self._positions[to_kind])
        return self.fill_absent(distance, to_kind, 2, torch.inf)

    def gaps(self, kind: str, to_kind: str) -> Tensor:
        """Return gaps ``(num_envs, n, m)``, negative where discs overlap."""
        return self.distances(kind, to_kind) - 2 * self.size

    def nearest(self, kind: str, to_kind: str) -> Tensor:
        """Return smallest gaps ``(num_envs, n)``, 0 for absent entities."""
        return self.fill_absent(self.gaps(kind, to_kind).amin(2), kind, 1, 0)

    def count(self, kind: str) -> Tensor:
        """Return how many of a kind are present, ``(num_envs,)`` int64."""
        return self.present[:, self._slices[kind]].sum(1)

    def velocity(self, kind: str) -> Tensor:
        """Return the velocities of a kind, ``(num_envs, n, 2)``."""
        return self.state[:, self._slices[kind], 2:]

    def penalty(self) -> Tensor:
        """Return the sums ``(num_envs,)`` of penalties for leaving the square."""
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
