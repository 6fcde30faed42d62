"""Particle physics for a batch of worlds, as in the multi-particle environments."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import Camera, Disc, Frame
from marl_pool.utils.errors import InputError

DT = 0.1
"""Seconds that a step lasts."""
DAMPING = 0.25
"""Share of its velocity that an entity loses in a step."""
CONTACT_FORCE = 1e2
"""Force for each unit of penetration."""
CONTACT_MARGIN = 1e-3
"""Softness of the contact: force is felt this far before two entities touch."""
SOFTPLUS_THRESHOLD = 40.0
"""Penetration in margins above which softness is below float64's resolution."""

TAIL_SECONDS = 0.3

POSITION = (0, 1)
"""The features of a particle's token that are its position, as of its state."""

Places = slice | Tensor
"""Where some entities stand in the state."""


@dataclass(frozen=True)
class Entities:
    """A kind of entity, and how many of it live in one world.

    Attributes:
        kind: its name.
        count: how many, 0 or more.
        color: RGB, for drawings.
        size: radius.
        movable: whether forces move it.
        collide: whether it pushes others that collide, and is pushed by them.
        max_speed: cap of its speed; None for no cap.
        mass: divides the forces on it.
    """

    kind: str
    count: int
    color: tuple[int, int, int]
    size: float = 0.05
    movable: bool = True
    collide: bool = False
    max_speed: float | None = None
    mass: float = 1.0


class ParticleEnv(BatchedEnv):
    r"""Discs in the plane that forces push: the physics of MPE, without walls.

    A step moves with the velocity that was, then damps, pushes and caps it:

    .. math::
        p &\leftarrow p + v\,dt \\
        v &\leftarrow (1 - damping)\,v + F / m\,dt, \quad |v| \le v_{max}

    This is step for step what ``BatchedEnv.step`` of mpe2 (Terry et al., PettingZoo,
    2021; Lowe et al., 2017) computes, except that coinciding centres feel no contact
    force here, where mpe2 divides by zero.

    The state is one tensor ``(num_envs, entities, 4)`` of position and velocity. It
    is updated in place. Movable entities come first in it, so that what moves is one
    contiguous slice.

    Args:
        num_envs: how many worlds.
        entities: the kinds, movable ones first.
        extent: half the side of the square that drawings show.
        options: the other arguments of `BatchedEnv`.

    Raises:
        InputError: a movable kind after an immovable one.
    """

    state: Tensor
    """``(num_envs, entities, 4)``: x, y, and their velocities."""

    def __init__(
        self,
        num_envs: int,
        entities: Sequence[Entities],
        *,
        extent: float,
        **options: Any,
    ) -> None:
        super().__init__(num_envs, **options)
        kinds = [kind for kind in entities for _ in range(kind.count)]
        self.entities, self.extent = tuple(kinds), extent
        self.num_movable = sum(kind.movable for kind in kinds)
        if not all(kind.movable for kind in kinds[: self.num_movable]):
            raise InputError("entities: expected the movable kinds before the others")
        moving = kinds[: self.num_movable]
        caps = [np.inf if k.max_speed is None else k.max_speed for k in moving]
        self._max_speed = self._constant(caps)[:, None]
        self._gain = self._constant([DT / kind.mass for kind in moving])[:, None]
        self._contacts = self._find_contacts()
        self._bind(self._constant(np.zeros((num_envs, len(kinds), 4))))

    @abstractmethod
    def token_entities(self, group: str) -> Tensor:
        """Which entity each token shows, ``(agents, N)`` int64 places in the state.

        The first token is the agent's own.
        """

    def goals(self) -> Tensor:
        """Points ``(num_envs, n, 2)`` that drawings mark with a cross; none here."""
        return self.state[:, :0, :2]

    def integrate(self, forces: Tensor) -> None:
        """Move every world by one step.

        Args:
            forces: ``(num_envs, movable, 2)`` of control; contacts add to them.
        """
        if self._contacts is not None:
            forces = forces + self.contact_forces()
        position, velocity = self._position, self._velocity
        position.add_(velocity, alpha=DT)
        velocity.mul_(1 - DAMPING).addcmul_(forces, self._gain)
        speed = torch.hypot(velocity[..., :1], velocity[..., 1:])
        # At rest this divides by zero; the infinity is clamped away.
        velocity.mul_(torch.div(self._max_speed, speed).clamp_(max=1))

    def contact_forces(self) -> Tensor:
        """The forces ``(num_envs, movable, 2)`` between colliding entities.

        Two discs repel each other along the line of their centres, by a softplus of
        their penetration. Immovable ones push and are not pushed.
        """
        if self._contacts is None:
            return torch.zeros_like(self._velocity)
        pushed, pushing, reach = self._contacts
        # Coordinates apart, so that what follows runs through contiguous memory.
        places = self.state[..., :2].movedim(-1, 0)
        delta = places[:, :, pushed, None] - places[:, :, None, pushing]
        distance = torch.hypot(delta[0], delta[1])
        penetration = torch.nn.functional.softplus(
            reach - distance, beta=1 / CONTACT_MARGIN, threshold=SOFTPLUS_THRESHOLD
        )
        # An entity meets itself here too, at delta 0: the floor makes that no force.
        floor = torch.finfo(self.dtype).eps
        strength = penetration.div_(distance.clamp_(min=floor)).mul_(CONTACT_FORCE)
        pushes = delta.mul_(strength).sum(-1).movedim(0, -1)
        if pushes.shape == self._velocity.shape:
            return pushes
        forces = torch.zeros_like(self._velocity)
        forces[:, pushed] = pushes
        return forces

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw world ``index``; see `BatchedEnv.frame`.

        Each entity drags a tail against its velocity, goals are crosses, and the
        camera never moves.
        """
        state = self.state[index].double().cpu().numpy()
        frame = Frame(Camera(self.extent, size))
        if attention is not None:
            group = group or next(iter(self.groups))
            shown = self.token_entities(group)[agent].cpu().numpy()
            weights = _by_entity(attention, shown, len(state))
            frame.attention(state[:, :2], int(shown[0]), weights)
        discs = [Disc(kind.kind, kind.color, kind.size) for kind in self.entities]
        frame.crosses(self.goals()[index].double().cpu().numpy())
        frame.discs(discs, state[:, :2], state[:, :2] - TAIL_SECONDS * state[:, 2:])
        frame.legend(dict.fromkeys(discs), f"step {int(self.steps[index])}")
        return frame.image

    def _find_contacts(self) -> tuple[Places, Places, Tensor] | None:
        """The entities that are pushed and that push, and when they touch."""
        pushing = [i for i, kind in enumerate(self.entities) if kind.collide]
        pushed = [i for i in pushing if self.entities[i].movable]
        if not pushed or len(pushing) < 2:
            return None
        sizes = self._constant([kind.size for kind in self.entities])
        reach = sizes[pushed][:, None] + sizes[pushing]
        return self._places(pushed), self._places(pushing), reach

    def _places(self, entities: list[int]) -> Places:
        """An index of these entities, a slice where they are neighbors."""
        first, last = entities[0], entities[-1]
        if len(entities) == last - first + 1:
            return slice(first, last + 1)
        return torch.tensor(entities, device=self.device)

    def _constant(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=self.dtype, device=self.device)

    def _bind(self, state: Tensor) -> None:
        """Adopt ``state``, and cut once the views that every step uses."""
        self.state = state
        self._position = state[:, : self.num_movable, :2]
        self._velocity = state[:, : self.num_movable, 2:]

    def _tensors(self) -> dict[str, Tensor]:
        return {"state": self.state}

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._bind(tensors["state"])


def _by_entity(attention: Tensor, shown: np.ndarray, entities: int) -> np.ndarray:
    """Sum the tokens' weights ``(N,)`` over those that show the same entity."""
    if attention.shape != shown.shape:
        raise InputError(
            f"attention: expected one weight for each of {len(shown)} tokens, "
            f"got the shape {tuple(attention.shape)}"
        )
    weights = attention.double().cpu().numpy()
    return np.bincount(shown, weights=weights, minlength=entities)
