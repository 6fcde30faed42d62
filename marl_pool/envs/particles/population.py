"""Entities that come and go in an episode: rules, and the lives sampled from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from marl_pool.options.names import unknown
from marl_pool.options.signatures import check_settings, show
from marl_pool.options.types import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from marl_pool.utils.errors import InputError, UnfitRuleError
from marl_pool.utils.randomness import uniform

if TYPE_CHECKING:
    from marl_pool.envs.particles.physics import Entities

NEVER = 1 << 40
"""Step that no episode reaches."""
MOST_NEWCOMERS = 16_384
"""Most entities that may arrive in an episode."""

Rules = Sequence[Mapping[str, Any]]
"""Option that lists rules, each a mapping of `Arrival`'s or `Departure`'s fields."""
Step = Annotated[
    PositiveInt | tuple[PositiveInt, PositiveInt],
    Field(description="an integer >= 1, or two: [low, high]"),
]
Number = Annotated[
    NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt],
    Field(description="an integer >= 0, or two: [low, high]"),
    AtMost(MOST_NEWCOMERS),
]


@dataclass(frozen=True)
class Departure:
    """Rule by which initial entities leave."""

    _: KW_ONLY
    step: Step
    """Steps of the episode after which an entity is gone; given two, each entity
    samples a number between them."""
    type: str | None = None
    """Type of the entities; None for agent, or else the first group of agents."""
    count: Number = 1
    """Number of entities; given two, each episode samples a number between them."""


@dataclass(frozen=True)
class Arrival(Departure):
    """Rule by which new entities, at rest, join the initial ones."""

    where: Literal["edge", "square", "disc"] = "edge"
    """Where they appear, uniformly: along the edge of a square around the origin, in
    it, or in a disc."""
    radius: PositiveFloat | None = None
    """Half the side of the square, or the radius of the disc; None for nine tenths of
    the half side of the picture."""


def _edge(numbers: Tensor) -> Tensor:
    # One number chooses the side, the other the point on it.
    side = numbers[..., 0].mul(4).long()
    along, end = 2 * numbers[..., 1] - 1, 2.0 * (side % 2) - 1
    upright = side < 2
    x, y = torch.where(upright, end, along), torch.where(upright, along, end)
    return torch.stack((x, y), -1)


def _square(numbers: Tensor) -> Tensor:
    return 2 * numbers - 1


def _disc(numbers: Tensor) -> Tensor:
    # The root makes points as dense at the edge as in the middle.
    length, angle = numbers[..., :1].sqrt(), 2 * math.pi * numbers[..., 1:]
    return length * torch.cat((torch.cos(angle), torch.sin(angle)), -1)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "edge": _edge,
    "square": _square,
    "disc": _disc,
}
"""Functions from uniform numbers ``(*B, 2)`` to points ``(*B, 2)`` of radius 1."""


def between(numbers: Tensor, low: int, high: int) -> Tensor:
    """Convert numbers in (0, 1) to integers from ``low`` to ``high``, both included."""
    # A product may round up to the next integer.
    return numbers.mul(high - low + 1).long().clamp(max=high - low) + low


AnyRule = TypeVar("AnyRule", bound=Departure)


class _Newcomers(NamedTuple):
    """The slots of a rule's entities."""

    rule: Arrival
    slots: range


class _Leavers(NamedTuple):
    """The slots of a rule's kind, and how many of them leave by earlier rules."""

    rule: Departure
    slots: tuple[int, ...]
    before: int


class EntityLives:
    """Sampler of the lives of each episode's entities, by rules.

    Every entity that may arrive has a slot, after the initial entities of its kind. A
    life is two steps: the first one in the world, and the first one in which the entity
    is gone, `NEVER` if that does not happen.

    Args:
        entities: the initial entities.
        learners: the kinds that are groups of agents.
        lone: the kinds whose number the task fixes.
        arrivals: mappings of the fields of `Arrival`.
        departures: mappings of the fields of `Departure`.
        max_steps: steps of an episode.
        radius: default of `Arrival.radius`.

    Attributes:
        entities: the kinds with all slots.
        starting: slots of the initial entities, in their order.

    Raises:
        InputError: a wrong field, an unknown or lone type, a step that no episode
            reaches, more departures than entities, or too many newcomers. One entity of
            each group of agents and of each `Entities.signal` type has to stay. A rule
            that another task may have raises an `UnfitRuleError`.
    """

    def __init__(
        self,
        entities: Sequence["Entities"],
        learners: Sequence[str],
        lone: Sequence[str],
        arrivals: Rules,
        departures: Rules,
        max_steps: int,
        radius: float,
    ) -> None:
        kinds = list(dict.fromkeys(kind.kind for kind in entities))
        default = "agent" if "agent" in kinds else [*learners, *kinds][0]
        context = kinds, lone, default, max_steps
        coming = _read_rules(Arrival, "env.arrivals", arrivals, *context)
        going = _read_rules(Departure, "env.departures", departures, *context)
        if (total := sum(_span(rule.count)[1] for rule in coming)) > MOST_NEWCOMERS:
            raise InputError(
                f"env.arrivals: expected at most {MOST_NEWCOMERS:,} entities in all, "
                f"got {total:,}"
            )
        self.radius, self._newcomers = radius, list[_Newcomers]()
        self.entities: list[Entities] = []
        self.starting: list[int] = []
        by_kind: dict[str, list[int]] = {kind: [] for kind in kinds}
        slot = 0
        for number, part in enumerate(entities):
            slots = range(slot, slot + part.count)
            slot = slots.stop
            self.entities.append(part)
            self.starting += slots
            by_kind[part.kind] += slots if not part.late else ()
            # Slots of newcomers follow the last initial ones of the kind.
            if part.kind in (other.kind for other in entities[number + 1 :]):
                continue
            for rule in (rule for rule in coming if rule.type == part.kind):
                most = _span(rule.count)[1]
                self.entities.append(replace(part, count=most))
                self._newcomers.append(_Newcomers(rule, range(slot, slot + most)))
                slot += most
        self._leavers = list(_leavers(entities, learners, going, by_kind))

    def sample(
        self, keys: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, list[tuple[range, Tensor]]]:
        """Sample the lives of episodes, and where newcomers appear.

        Args:
            keys: ``(k,)`` keys of random streams.
            starts: ``(k, initial entities, 2)``, lives by the task's own rules, under
                which the first of each kind is always there and then does not leave;
                None if all are always there.

        Returns:
            Lives ``(k, entities, 2)`` int64, and points ``(k, n, 2)`` of the newcomers.
        """
        shape = len(keys), sum(part.count for part in self.entities), 2
        lives, places, start = keys.new_zeros(shape), [], 0
        lives[..., 1] = NEVER
        if starts is not None:
            lives[:, self.starting] = starts
        for arrival, slots in self._newcomers:
            # All episodes take numbers for all slots, so that the next rule begins at
            # the same place in each stream.
            most = len(slots)
            numbers = uniform(keys, 1 + 3 * most, start)
            start += 1 + 3 * most
            count = between(numbers[:, :1], *_span(arrival.count))
            steps = between(numbers[:, 1 : 1 + most], *_span(arrival.step))
            comes = torch.arange(most, device=keys.device) < count
            lives[:, slots, 0] = torch.where(comes, steps, NEVER)
            points = PLACES[arrival.where](
                numbers[:, 1 + most :].view(len(keys), most, 2)
            )
            places.append((slots, points * (arrival.radius or self.radius)))
        for rule, members, before in self._leavers:
            # The order in which a kind's entities leave is the same for all rules.
            # The place is one that the numbers of the rules do not reach.
            order = uniform(keys, len(members), (1 + min(members)) << 24)
            if starts is not None:
                # Entities that are there leave before those that the episode lacks.
                order = order + (lives[:, members, 0] > 0)
                # Largest, so that the first one, which the task needs, would leave
                # last.
                order[:, 0] = 2
            # The second `argsort` turns an order of entities into the rank of each.
            rank = order.argsort(1).argsort(1)
            numbers = uniform(keys, 1 + len(members), start)
            start += 1 + len(members)
            # Earlier rules take the first ``before`` entities.
            leaving = rank - before
            goes = (leaving >= 0) & (
                leaving < between(numbers[:, :1], *_span(rule.count))
            )
            steps = between(numbers[:, 1:], *_span(rule.step))
            if starts is not None:
                goes[:, 0] = False
            ends = lives[:, members, 1]
            lives[:, members, 1] = torch.where(goes, steps, ends)
        return lives, places


def _span(value: Any) -> tuple[int, int]:
    """Return the lowest and the highest number of a range, or a number twice."""
    low, high = value if isinstance(value, list | tuple) else (value, value)
    return int(low), int(high)


def _read_rules(
    form: type[AnyRule],
    key: str,
    rules: Rules,
    kinds: Sequence[str],
    lone: Sequence[str],
    default: str,
    max_steps: int,
) -> list[AnyRule]:
    """Check rules and name their types."""
    typed = []
    for number, fields in enumerate(rules):
        where = f"{key}[{number}]"
        rule = form(**check_settings(form, fields, where))
        for name in ("step", "count"):
            low, high = _span(getattr(rule, name))
            if low > high:
                raise InputError(
                    f"{where}.{name}: expected [low, high] with low <= high, got "
                    f"[{low}, {high}]"
                )
        if (last := _span(rule.step)[1]) >= max_steps:
            raise InputError(
                f"{where}.step: expected a step before the episode's end, below "
                f"env.max_steps={max_steps}, got {last}"
            )
        if rule.type is not None and rule.type not in kinds:
            raise InputError(f"{where}.type: {unknown('type', rule.type, kinds)}")
        kind = rule.type or default
        if kind in lone:
            others = " or ".join(name for name in kinds if name not in lone)
            raise UnfitRuleError(
                f"{where}.type: expected {others}, since the task fixes the number of "
                f"type {kind!r}, got {show(rule.type)}"
            )
        typed.append(replace(rule, type=kind))
    return typed


def _leavers(
    entities: Sequence["Entities"],
    learners: Sequence[str],
    rules: Sequence[Departure],
    by_kind: Mapping[str, Sequence[int]],
) -> Iterator[_Leavers]:
    staying = {part.kind for part in entities if part.signal} | set(learners)
    gone = dict.fromkeys(by_kind, 0)
    for rule in rules:
        kind = str(rule.type)
        slots, before = by_kind[kind], gone[kind]
        # A rule counts with its largest number, so that every episode has enough.
        gone[kind] += _span(rule.count)[1]
        most = max(len(slots) - (kind in staying), 0)
        if gone[kind] > most:
            stays = ", so that one stays" if kind in staying else ""
            raise UnfitRuleError(
                f"env.departures: expected at most {most} of {len(slots)} of type "
                f"{kind!r} to leave{stays}, got {gone[kind]}"
            )
        if slots:
            yield _Leavers(rule, tuple(slots), before)
