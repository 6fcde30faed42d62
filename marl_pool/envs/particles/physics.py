"""Particle physics of the multi-particle environments (MPE), for a batch."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import (
    LARGEST_OBSERVATION,
    AgentGroup,
    BatchedEnv,
    EnvOptions,
)
from marl_pool.envs.drawing.canvas import MIN_RADIUS, Disc, Frame, Projection
from marl_pool.envs.drawing.marks import Glyphs
from marl_pool.envs.particles.population import NEVER, EntityLives, Rules
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec, self_first
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys

DT = 0.1
"""Duration of a step in seconds."""
DAMPING = 0.25
"""Fraction of its velocity that an entity loses in a step."""
LEAD = (2 - DAMPING) * DT
"""Seconds of motion at the current velocity before a force changes a position."""
CONTACT_FORCE = 1e2
"""Force per unit of penetration."""
CONTACT_MARGIN = 1e-3
"""Softness of the contact: the force sets in at this distance before two touch."""
SOFTPLUS_THRESHOLD = 40.0
"""Penetration in margins above which softness is below float64's resolution."""
SOFTPLUS_BLOCK = 32
"""Numbers that torch's softplus computes at a time, or a multiple of it."""

TAIL_SECONDS = 0.3
"""Length of a drawn tail in seconds of the current velocity."""
NEW = 10
"""Steps for which an entity that has arrived is drawn with a ring."""

POSITION = (0, 1)
"""Indices of the position in a particle's features and state."""

DIRECTIONS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
"""Direction of each discrete choice."""

Places = slice | Tensor
"""Index of some entities in the state."""


class Steering:
    """Conversion of MPE's actions to forces and back.

    A discrete action is one of five choices: no-op, left, right, down, up. A continuous
    action is five numbers in [0, 1]: the first has no effect, and the others push left,
    right, down and up at the same time.

    Args:
        acceleration: force of a full push to one side.
        continuous: True for five numbers, False for five choices.
        device: device of the forces.
        dtype: dtype of the forces.
    """

    def __init__(
        self,
        acceleration: float,
        continuous: bool,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.acceleration, self.continuous = acceleration, continuous
        directions = torch.tensor(DIRECTIONS, device=device, dtype=dtype)
        self._pushes = directions * acceleration

    @property
    def space(self) -> spaces.Box | spaces.Discrete:
        """Action space of one agent."""
        return spaces.Box(0, 1, (5,)) if self.continuous else spaces.Discrete(5)

    def forces(self, actions: Tensor) -> Tensor:
        """Convert actions to forces ``(num_envs, agents, 2)``; numbers are clipped."""
        if self.continuous:
            pushes = actions.detach().to(self._pushes.dtype).clamp(0, 1)
            # Right minus left, up minus down.
            return (pushes[..., 2::2] - pushes[..., 1::2]).mul_(self.acceleration)
        return self.push(actions)

    def push(self, choices: Tensor) -> Tensor:
        """Convert choices ``(num_envs, agents)`` to forces ``(…, 2)``."""
        # Flat, since index_select is several times faster than advanced indexing.
        pushes = self._pushes.index_select(0, choices.flatten())
        return pushes.view(*choices.shape, 2)

    def toward(self, force: Tensor) -> Tensor:
        """Find the actions whose force is nearest to ``force`` ``(*B, 2)``."""
        if not self.continuous:
            away = force[..., None, :] - self._pushes.to(force)
            return away.square().sum(-1).argmin(-1)
        push = (force / self.acceleration).clamp(-1, 1)
        # Push to one side of each axis, since opposite pushes cancel.
        leftward, downward = (-push).clamp(min=0).unbind(-1)
        rightward, upward = push.clamp(min=0).unbind(-1)
        return torch.stack(
            (torch.zeros_like(leftward), leftward, rightward, downward, upward), -1
        )


def dead_beat(away: Tensor, mass: float = 1.0, lead: float = LEAD) -> Tensor:
    """Return the forces ``(*B, 2)`` by which agents reach their targets in two steps.

    Args:
        away: ``(*B, 4)`` positions and velocities of the targets, relative to agents.
        mass: mass of an agent.
        lead: time by which the velocities are extrapolated.
    """
    return mass * (away[..., :2] + lead * away[..., 2:]) / DT**2


@dataclass(frozen=True)
class Entities:
    """One kind of entity, ``count`` of them in each environment."""

    kind: str
    count: int
    color: tuple[int, int, int]
    size: float = 0.05
    """Radius of the disc."""
    movable: bool = True
    collide: bool = False
    """True if it exchanges contact forces with others that collide."""
    max_speed: float | None = None
    mass: float = 1.0
    acceleration: float = 0.0
    """Force of an action's full push to one side."""
    signal: bool = True
    """True if it matters for the task."""
    on_top: bool = False
    """True if it is drawn over the others."""
    late: bool = False
    """True if the task's own rules let it arrive later; no `departures` apply to it."""


class ParticleOptions(EnvOptions, total=False):
    """Options that particle environments pass on to `ParticleEnv`."""

    arrivals: Rules
    departures: Rules


class ParticleEnv(BatchedEnv):
    r"""Discs in the plane moved by forces: the physics of MPE, without walls.

    A step advances positions with the old velocity, then updates the velocity:

    .. math::
        p &\leftarrow p + v\,dt \\
        v &\leftarrow (1 - damping)\,v + F / m\,dt, \quad |v| \le v_{max}

    The update equals ``World.step`` of mpe2 (`Terry et al., PettingZoo, 2021
    <https://arxiv.org/abs/2009.14471>`_; `Lowe et al., 2017
    <https://arxiv.org/abs/1706.02275>`_), except that coinciding centres exert no
    contact force here, where mpe2 divides by zero.

    An agent observes every entity as a token: position and velocity relative to its
    own, divided by `feature_scale`. The order is self, the immovable entities, the
    other movable ones.

    The state is one tensor ``(num_envs, entities, 4)`` of positions and velocities,
    updated in place. Movable entities come first, so that they are one contiguous
    slice.

    Entities may arrive and leave while an episode runs. Each of them has a slot in all
    tensors, and `present` says which are in the world. Absent entities rest, exert and
    receive no force, are padding among the tokens and are not drawn; absent agents
    neither act nor earn. The start of an episode is the same as without rules. A
    subclass passes on `ParticleOptions`, leaves absent entities out of its rewards by
    `fill_absent`, and implements ``place`` for the initial entities alone.

    Args:
        entities: the initial entities, movable ones first.
        learners: the kinds that are groups of agents.
        continuous_actions: True for five numbers in [0, 1], of which the second to
            fifth push left, right, down and up; False for one of five choices: no-op,
            left, right, down, up.
        extent: half the side of the square that `frame` shows.
        random_numbers: by kind, how many of them an entity uses in a step.
        changing: True if ``place`` also writes the `lives` of all its entities; the
            first of each kind is always there.
        lone: kinds whose number the task fixes, which neither arrive nor leave.
        arrivals: rules by which entities arrive, each a mapping such as
            ``{type: agent, count: 2, step: [5, 20], where: edge, radius: 1}``.
            ``count`` and ``step`` are a number or ``[low, high]``, from which each
            episode samples a count, and each entity a step. Defaults: the type agent,
            or else the first group of agents; a count of 1; the ``edge`` of a square
            (or ``square``, ``disc``); and as ``radius``, its half side, nine tenths of
            the picture's.
        departures: rules by which initial entities leave, such as ``{type: agent,
            count: 1, step: 10}``; which of them leave is random. One of each group of
            agents, and of each type that matters for the task, stays.
        options: other arguments of `BatchedEnv`.

    Raises:
        InputError: movable kinds after others, or rules that `EntityLives` refuses.
    """

    state_names: ClassVar[tuple[str, ...]] = ("state",)
    type_names: ClassVar[tuple[str, ...]]
    """Names of the token types: self, and the kinds of entities."""
    feature_scale: ClassVar[float] = 1.0

    state: Tensor
    """``(num_envs, entities, 4)``: x, y, and their velocities."""
    lives: Tensor | None = None
    """``(num_envs, entities, 2)`` int64: the steps of the episode from which an entity
    is in the world, and from which it is gone; None if nothing comes or goes."""

    def __init__(
        self,
        num_envs: int,
        entities: Sequence[Entities],
        *,
        learners: Sequence[str] = (),
        continuous_actions: bool = True,
        extent: float,
        max_steps: int,
        random_numbers: Mapping[str, int] | None = None,
        changing: bool = False,
        lone: Sequence[str] = (),
        arrivals: Rules = (),
        departures: Rules = (),
        **options: Any,
    ) -> None:
        self._population, starting, self._changing = None, entities, changing
        self._may_grow = bool(arrivals) or any(kind.late for kind in entities)
        if arrivals or departures:
            self._population = EntityLives(
                *(entities, learners, lone, arrivals, departures),
                *(max_steps, 0.9 * extent),
            )
            entities = self._population.entities
        needs = random_numbers or {}
        size = sum(kind.count * needs.get(kind.kind, 0) for kind in entities)
        super().__init__(num_envs, max_steps=max_steps, dynamics_size=size, **options)
        # Repeat each kind for its entities; the state has the movable ones first.
        kinds = [kind for kind in entities for _ in range(kind.count)]
        self.entities, self.extent = tuple(kinds), extent
        self._slices = slices_of(self.entities)
        self.num_movable = sum(kind.movable for kind in kinds)
        if not all(kind.movable for kind in kinds[: self.num_movable]):
            raise InputError("entities: expected the movable kinds before the others")
        # Constants of the movable entities.
        moving = kinds[: self.num_movable]
        caps = [np.inf if k.max_speed is None else k.max_speed for k in moving]
        self._max_speed = self._constant(caps)[:, None]
        self._gain = self._constant([DT / kind.mass for kind in moving])[:, None]
        self._steering = {
            kind.kind: Steering(
                kind.acceleration, continuous_actions, self.device, self.dtype
            )
            for kind in entities
        }
        # The entities that the tokens show do not change, so find them once.
        self._order, self._types, self.groups = {}, {}, {}
        self._state_views: dict[str, tuple[Tensor, Tensor]] = {}
        signal = {"self", *(kind.kind for kind in entities if kind.signal)}
        for name in learners:
            places = self._slices[name]
            spec = TokenSpec(
                len(kinds),
                4,
                self.type_names,
                signal_types=tuple(name for name in self.type_names if name in signal),
                positions=POSITION,
            )
            # The group refuses sizes that no memory holds, before lists are built.
            count, space = places.stop - places.start, self._steering[name].space
            self.groups[name] = AgentGroup(count, spec, space)
            self._order[name], self._types[name] = self._as_seen(name, self.type_names)
        self._contacts = self._find_contacts()
        self._starting = tuple(kind for kind in starting for _ in range(kind.count))
        if self._population is not None or changing:
            # A broadcast array repeats one row in memory; each entity needs a separate
            # one.
            lives = np.broadcast_to([0, NEVER], (num_envs, len(kinds), 2))
            self.lives = self._constant(lives.copy(), torch.int64)
        self._bind(self._constant(np.zeros((num_envs, len(kinds), 4))))

    @property
    def present(self) -> Tensor:
        """``(num_envs, entities)`` bool: entities that are in the world."""
        if self.lives is None:
            return torch.ones_like(self.state[..., 0], dtype=torch.bool)
        begins, ends = self.lives.unbind(-1)
        step = self.steps[:, None]
        return (begins <= step) & (step < ends)

    @property
    @override
    def active(self) -> dict[str, Tensor]:
        if self.lives is None:
            return super().active
        present = self.present
        return {name: present[:, self._slices[name]] for name in self.groups}

    @property
    @override
    def may_be_absent(self) -> bool:
        return self.lives is not None

    def fill_absent(
        self, values: Tensor, kind: str | slice, dim: int, fill: float | bool
    ) -> Tensor:
        """Replace the values of the absent entities of a kind.

        Args:
            values: ``(num_envs, …)``.
            kind: name of the kind, or a slice of the entities.
            dim: dimension of the entities.
            fill: value in their place.
        """
        if self.lives is None:
            return values
        shape = [len(values), *(1 for _ in values.shape[1:])]
        shape[dim] = -1
        places = self._slices[kind] if isinstance(kind, str) else kind
        return values.masked_fill(~self.present[:, places].reshape(shape), fill)

    def earned(self, **rewards: Tensor) -> dict[str, Tensor]:
        """Return rewards ``(num_envs, agents)`` by group, 0 for absent agents."""
        return {
            name: self.fill_absent(reward, name, 1, 0)
            for name, reward in rewards.items()
        }

    @override
    def _place_rows(self, rows: Tensor) -> None:
        if self._population is None:
            super()._place_rows(rows)
            return
        # `place` sees an environment of the initial entities alone.
        start, slots = copy(self), self._population.starting
        start.entities = self._starting
        start.num_movable = sum(kind.movable for kind in self._starting)
        start._slices = slices_of(self._starting)
        start.state = self.state[:, slots]
        assert self.lives is not None
        start.lives = self.lives[:, slots]
        start.place(rows, self._reset_keys(rows))
        # `place` may have replaced other tensors of the copy.
        for name in set(self.state_names) - {"state"}:
            setattr(self, name, getattr(start, name))
        ids, episodes = self.env_ids[rows], self.episodes[rows]
        # A separate stream, so that rules do not change the start.
        keys = stream_keys(self.seed, ids, episodes, Purpose.RESET, part=1)
        starts = start.lives[rows] if self._changing else None
        lives, newcomers = self._population.sample(keys, starts)
        state = torch.zeros_like(self.state[rows])
        state[:, slots] = start.state[rows]
        for places, points in newcomers:
            state[:, places, :2] = points.to(self.dtype)
        self.state[rows], self.lives[rows] = state, lives

    @override
    def observe(self) -> dict[str, Tokens]:
        """Return tokens ``(num_envs, agents, N)``; types and padding are shared."""
        observations = {}
        for name, (origin, types, padding) in self._views.items():
            # index_select on flat indices is several times faster than indexing by [].
            features = self.state.index_select(1, self._order[name].flatten())
            # In place: `index_select` has copied the state.
            features = features.view(*types.shape, 4).sub_(origin)
            if self.feature_scale != 1:
                features.div_(self.feature_scale)
            padding = self._absent(self._order[name], padding)
            observations[name] = Tokens(features, types, padding)
        return observations

    def _absent(self, order: Tensor, padding: Tensor) -> Tensor:
        """Return the padding mask ``(num_envs, agents, N)`` of tokens.

        Args:
            order: ``(agents, N)`` entities of the tokens, the observer first.
            padding: the mask where nothing comes or goes.
        """
        if self.lives is None:
            return padding
        present = self.present.index_select(1, order.flatten())
        present = present.view(self.num_envs, *order.shape)
        # An absent observer, which is its first token, perceives nothing.
        return ~(present & present[..., :1])

    @property
    @override
    def state_specs(self) -> dict[str, TokenSpec]:
        count, width = self.state_features().shape[1:]
        spec = TokenSpec(count, width, ("self", *self._slices), positions=POSITION)
        return dict.fromkeys(self.groups, spec)

    @override
    def observe_state(self) -> dict[str, Tokens]:
        """Return a token for each entity, the agent itself first."""
        entities, states = self.state_features(), {}
        for name in self.groups:
            if name not in self._state_views:
                self._state_views[name] = self._as_seen(name, ("self", *self._slices))
            order, types = self._state_views[name]
            shape = self.num_envs, *order.shape
            features = entities.index_select(1, order.flatten()).view(*shape, -1)
            padding = torch.zeros(shape, dtype=torch.bool, device=self.device)
            padding = self._absent(order, padding)
            states[name] = Tokens(features, types.expand(shape), padding)
        return states

    def state_features(self) -> Tensor:
        """Return the features of entities for critics, ``(num_envs, entities, F)``.

        Absolute position and velocity come first.
        """
        return self.state / self.feature_scale

    def _as_seen(self, name: str, type_names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the entities in the order in which agents of a kind see them.

        Returns:
            The entities, ``(agents, entities)`` int64: self, those that cannot move,
            and the other movable ones; and their types, ``(entities,)`` int64.
        """
        count, places = len(self.entities), self._slices[name]
        members = torch.arange(places.start, places.stop, device=self.device)
        # Count from the first immovable entity, so that the movable ones come last.
        order = self_first((members - self.num_movable) % count, count)
        order = (order + self.num_movable) % count
        # The kind of the observer need not have a type, if it has one member.
        still_first = (*range(self.num_movable, count), *range(self.num_movable))
        kinds = (self.entities[i].kind for i in still_first if i != places.start)
        types = [SELF_TYPE, *map(type_names.index, kinds)]
        return order, torch.tensor(types, device=self.device)

    def token_entities(self, group: str) -> Tensor:
        """Return the entity of each token, ``(agents, N)`` int64; self comes first."""
        return self._order[group]

    def goals(self) -> Tensor:
        """Return points ``(num_envs, n, 2)`` that `frame` marks with crosses."""
        return self.state[:, :0, :2]

    def integrate(self, forces: Tensor) -> None:
        """Advance by control forces ``(num_envs, movable, 2)``, plus contacts."""
        if self._contacts is not None:
            forces = forces + self.contact_forces()
        if self.lives is None:
            self._move(forces)
            return
        # Absent entities stay where they left or will arrive.
        before = self.state.clone()
        self._move(forces)
        # In place, since `_bind` holds views of the state.
        self.state.copy_(torch.where(self.present[..., None], self.state, before))

    def _move(self, forces: Tensor) -> None:
        position, velocity = self._position, self._velocity
        position.add_(velocity, alpha=DT)
        velocity.mul_(1 - DAMPING).addcmul_(forces, self._gain)
        # Limit the speed. At rest the ratio is infinite, and the clamp makes it 1.
        speed = torch.hypot(velocity[..., :1], velocity[..., 1:])
        velocity.mul_(torch.div(self._max_speed, speed).clamp_(max=1))

    def contact_forces(self) -> Tensor:
        """Compute the contact forces ``(num_envs, movable, 2)``.

        Two colliding discs repel each other along the line of their centres, by a
        softplus of their penetration. Immovable discs push and are not pushed.
        """
        if self._contacts is None:
            return torch.zeros_like(self._velocity)
        # Pairs of a pushed and a pushing entity.
        pushed, pushing, reach = self._contacts
        # Coordinates first, so that the operations below run over contiguous memory.
        places = self.state[..., :2].movedim(-1, 0)
        delta = places[:, :, pushed, None] - places[:, :, None, pushing]
        distance = torch.hypot(delta[0], delta[1])
        penetration = soft_penetration(reach - distance)
        # Each entity is paired with itself too, at delta 0: the floor avoids 0 / 0.
        floor = torch.finfo(self.dtype).eps
        strength = penetration.div_(distance.clamp_(min=floor)).mul_(CONTACT_FORCE)
        if self.lives is not None:
            present = self.present
            pair = present[:, pushed, None] & present[:, None, pushing]
            strength = strength.masked_fill_(~pair, 0)
        pushes = delta.mul_(strength).sum(-1).movedim(0, -1)
        # All movable entities collide, so there is a force for each.
        if pushes.shape == self._velocity.shape:
            return pushes
        forces = torch.zeros_like(self._velocity)
        forces[:, pushed] = pushes
        return forces

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        # Each entity has a tail opposite to its velocity; goals are crosses.
        state = self.state[index].double().cpu().numpy()
        frame = Frame(Projection(self.extent, size))
        if weights is not None:
            entities = self.token_entities(group)[agent].cpu().numpy()
            # Sum the weights of tokens that show the same entity.
            by_entity = np.bincount(entities, weights=weights, minlength=len(state))
            frame.attention(state[:, :2], int(entities[0]), by_entity)
        discs = [Disc(kind.kind, kind.color, kind.size) for kind in self.entities]
        goals = self.goals()[index].double().cpu().numpy()
        frame.crosses(goals)
        # Earlier discs cover later ones.
        visible = self.present[index].nonzero()[:, 0].tolist()
        order = sorted(visible, key=lambda i: not self.entities[i].on_top)
        places, tails = state[order, :2], TAIL_SECONDS * state[order, 2:]
        frame.discs([discs[i] for i in order], places, places - tails)
        if self.lives is not None:
            begins = self.lives[index, :, 0].cpu()
            age = int(self.steps[index]) - begins
            new = [i for i in visible if begins[i] > 0 and age[i] < NEW]
            frame.rings([discs[i] for i in new], state[new, :2])
        frame.legend(
            dict.fromkeys(discs),
            cross="goal" if len(goals) else None,
            ring="new" if self._may_grow else None,
        )
        return frame.image

    @override
    def glyphs(
        self, tokens: Tokens, index: int, *, group: str, agent: int, size: int
    ) -> Glyphs:
        entity = int(self.token_entities(group)[agent, 0])
        projection = Projection(self.extent, size)
        observer = self.state[index, entity, :2].double().cpu().numpy()
        places = self.perceived_places(tokens, index, group=group, agent=agent)
        kinds = {kind.kind: kind for kind in self.entities}
        kinds[self.type_names[SELF_TYPE]] = self.entities[entity]
        looks = [
            kinds.get(self.type_names[number], self.entities[entity])
            for number in tokens.types.tolist()
        ]
        return Glyphs(
            places=projection.project(places.cpu().numpy()),
            colors=[look.color for look in looks],
            radii=[max(MIN_RADIUS, projection.pixels(look.size)) for look in looks],
            letters=[""] * len(looks),
            observer=projection.project(observer),
        )

    def perceived_places(
        self, tokens: Tokens, index: int, *, group: str, agent: int
    ) -> Tensor:
        """Return where an agent perceives its tokens ``(N,)``: ``(N, 2)`` float64.

        Features of tokens that are NaN count as 0.
        """
        entity = int(self.token_entities(group)[agent, 0])
        # Positions are relative to the observer.
        away = tokens.features[:, list(POSITION)].double().nan_to_num()
        return self.state[index, entity, :2].double() + away * self.feature_scale

    def _find_contacts(self) -> tuple[Places, Places, Tensor] | None:
        """Return the pushed and the pushing entities, and the distances of contact."""
        pushing = [i for i, kind in enumerate(self.entities) if kind.collide]
        pushed = [i for i in pushing if self.entities[i].movable]
        # A contact needs two entities, one of which can move.
        if not pushed or len(pushing) < 2:
            return None
        if (pairs := len(pushed) * len(pushing)) > LARGEST_OBSERVATION:
            raise InputError(
                f"env: expected at most {LARGEST_OBSERVATION:,} pairs of entities that "
                f"collide, got {pairs:,}"
            )
        sizes = self._constant([kind.size for kind in self.entities])
        reach = sizes[pushed][:, None] + sizes[pushing]
        return self._index(pushed), self._index(pushing), reach

    def _index(self, entities: list[int]) -> Places:
        """Return an index of these entities; a slice if they are contiguous."""
        first, last = entities[0], entities[-1]
        if len(entities) == last - first + 1:
            return slice(first, last + 1)
        return torch.tensor(entities, device=self.device)

    def _bind(self, state: Tensor) -> None:
        """Set the state, and create the views of it that every step uses."""
        self.state = state
        self._position = state[:, : self.num_movable, :2]
        self._velocity = state[:, : self.num_movable, 2:]
        # Positions of the entities of each kind.
        self._positions = {k: state[:, rows, :2] for k, rows in self._slices.items()}
        self._never = torch.zeros(len(state), dtype=torch.bool, device=self.device)
        self._views = {}
        for kind, order in self._order.items():
            types = self._types[kind].expand(len(state), len(order), -1).contiguous()
            origin = state[:, self._slices[kind], None]
            self._views[kind] = origin, types, torch.zeros_like(types, dtype=torch.bool)

    @override
    def _tensors(self) -> dict[str, Tensor]:
        lives = {} if self.lives is None else {"lives": self.lives}
        return super()._tensors() | lives

    @override
    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super()._set_tensors(tensors)
        self._bind(tensors["state"])


def slices_of(entities: Sequence[Entities]) -> dict[str, slice]:
    """Return the slice of each kind's entities, which are contiguous."""
    names = [entity.kind for entity in entities]
    return {
        name: slice(names.index(name), names.index(name) + names.count(name))
        for name in dict.fromkeys(names)
    }


def soft_penetration(overlap: Tensor) -> Tensor:
    """Convert overlaps of any shape, negative if apart, to smooth penetrations.

    For numbers at the end of a tensor that do not fill a block, torch uses a different
    function, with different last bits. Padding to whole blocks gives an environment the
    same trajectory in batches of every size, as long as one thread computes them.
    """
    count = overlap.numel()
    missing = -count % SOFTPLUS_BLOCK
    if missing:
        padded = torch.nn.functional.pad(overlap.flatten(), (0, missing))
        return soft_penetration(padded)[:count].view(overlap.shape)
    return torch.nn.functional.softplus(
        overlap, beta=1 / CONTACT_MARGIN, threshold=SOFTPLUS_THRESHOLD
    )


def distances(places: Tensor, targets: Tensor) -> Tensor:
    """Return the distances ``(num_envs, n, m)`` of two sets of positions."""
    away = places[:, :, None] - targets[:, None]
    return torch.hypot(away[..., 0], away[..., 1])
