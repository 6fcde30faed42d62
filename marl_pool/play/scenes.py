"""Environments as the page draws them, and how a person may change them."""

import base64
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.boxworld.codes import AGENT, FLOOR, LOCK, LOOSE, NOTHING
from marl_pool.envs.boxworld.env import BoxWorld
from marl_pool.envs.cartpole.env import CartPole
from marl_pool.envs.drawing.canvas import opencv
from marl_pool.envs.particles.physics import ParticleEnv
from marl_pool.tokens import Tokens

PUSH = 6.0
"""Angular velocity in rad/s that a full push gives to the pole."""
PICTURE = 384
"""Height and width in pixels of environments that are sent as images."""

Env = TypeVar("Env", bound=BatchedEnv)


class Scene(Generic[Env]):
    """An environment without a drawing of its own: an image, and a row of tokens."""

    kind: ClassVar[str] = "picture"
    """Name of the drawing in the page."""
    movable: ClassVar[bool] = False
    """Entities can be dragged to another place."""
    pushable: ClassVar[bool] = False
    """There is a pole to push."""
    distractors: ClassVar[str | None] = None
    """Option of the environment that adds distractors; None if only the perturbation
    ``inject`` can."""

    def describe(self, env: Env, group: str) -> dict[str, Any]:
        """Return what does not change, JSON-ready."""
        grid = env.patch_grid
        return {
            "kind": self.kind,
            "movable": self.movable,
            "pushable": self.pushable,
            "grid": None if grid is None else [*grid, grid.side],
            "names": self.names(env, group),
        }

    def names(self, env: Env, group: str) -> list[str]:
        """Return the name of each token."""
        spec = env.groups[group].tokens
        return [f"{spec.type_names[0]} {i}" for i in range(spec.num_tokens)]

    def state(self, env: Env) -> dict[str, Any]:
        """Return the current state of the first environment, JSON-ready."""
        cv2 = opencv()
        image = env.frame(size=PICTURE)
        _, data = cv2.imencode(".jpg", image[..., ::-1])
        return {"picture": base64.b64encode(data.tobytes()).decode()}

    def entities(self, env: Env, group: str) -> Tensor:
        """Return the entity that each token shows, ``(agents, N)`` int64."""
        spec = env.groups[group]
        return torch.arange(spec.tokens.num_tokens).expand(spec.num_agents, -1)

    def places(self, env: Env, tokens: Tokens, agent: int) -> list[Any] | None:
        """Return where an agent perceives each token; None if tokens have no place.

        ``tokens`` have the batch ``(1, agents)``.
        """
        return None

    def move(self, env: Env, entity: int, x: float, y: float) -> None:
        """Move an entity to another place, if it can be there."""

    def push(self, env: Env, strength: float) -> None:
        """Push the pole; ``strength`` in [-1, 1] is positive to the right."""


class ParticleScene(Scene[ParticleEnv]):
    """Discs in the plane; a token is an entity."""

    kind = "particles"
    movable = True

    @override
    def describe(self, env: ParticleEnv, group: str) -> dict[str, Any]:
        entities = [
            {
                "kind": kind.kind,
                "size": kind.size,
                "color": "#{:02x}{:02x}{:02x}".format(*kind.color),
            }
            for kind in env.entities
        ]
        description = {"extent": env.extent, "entities": entities}
        return {**super().describe(env, group), **description}

    @override
    def names(self, env: ParticleEnv, group: str) -> list[str]:
        return [kind.kind for kind in env.entities]

    @override
    def state(self, env: ParticleEnv) -> dict[str, Any]:
        return {
            "state": rounded(env.state[0]),
            "present": env.present[0].int().tolist(),
            "goals": rounded(env.goals()[0]),
        }

    @override
    def entities(self, env: ParticleEnv, group: str) -> Tensor:
        return env.token_entities(group)

    @override
    def places(self, env: ParticleEnv, tokens: Tokens, agent: int) -> list[Any]:
        visible, group = tokens.at((0, agent)), next(iter(env.groups))
        return rounded(env.perceived_places(visible, 0, group=group, agent=agent))

    @override
    def move(self, env: ParticleEnv, entity: int, x: float, y: float) -> None:
        if entity < len(env.entities):
            place = [min(max(at, -env.extent), env.extent) for at in (x, y)]
            env.state[0, entity] = torch.tensor([*place, 0, 0], dtype=env.dtype)


class CartPoleScene(Scene[CartPole]):
    """A cart with a pole; a token is a sensor channel."""

    kind = "cartpole"
    pushable = True
    distractors = "noise_channels"

    @override
    def names(self, env: CartPole, group: str) -> list[str]:
        return env.channel_names()

    @override
    def state(self, env: CartPole) -> dict[str, Any]:
        cart = rounded(torch.stack((env.state[0, 0], env.angle[0])))
        return {"cart": cart, "names": env.channel_names()}

    @override
    def push(self, env: CartPole, strength: float) -> None:
        x, velocity, _, _, turn = env.state[0, :5].tolist()
        # The angle grows to the left.
        start = [x, velocity, float(env.angle[0]), turn - PUSH * strength]
        env.put(torch.tensor([0]), torch.tensor([start]))


class BoxWorldScene(Scene[BoxWorld]):
    """A room of cells; a token is a cell, or one of the things in them."""

    kind = "boxworld"
    movable = True

    @override
    def describe(self, env: BoxWorld, group: str) -> dict[str, Any]:
        return {**super().describe(env, group), "side": env.n}

    @override
    def state(self, env: BoxWorld) -> dict[str, Any]:
        colors = env.cell_colors(0).tolist()
        return {"colors": colors, "cells": env.token_places(0).tolist()}

    @override
    def move(self, env: BoxWorld, entity: int, x: float, y: float) -> None:
        """Move the agent, the loose key or a whole box to free cells.

        ``entity`` is a token; x and y are the column and row of the cell.
        """
        codes, places, n = env.codes[0], env.places[0], env.n
        cells = self._cells(env, entity)
        shift = round(y) * n + round(x) + 1 - cells[0] if cells else 0
        after = [cell + shift for cell in cells]
        # Stay within one row of the room, on free cells.
        free = {*cells, *(codes == FLOOR).nonzero()[:, 0].tolist()} - {0, n**2 + 1}
        rows = {(cell - 1) // n for cell in after} | {round(y)}
        if not shift or len(rows) > 1 or not free.issuperset(after):
            return
        moved = codes[cells].clone()
        codes[cells] = FLOOR
        codes[after] = moved
        # The tokens follow; tokens of opened boxes must not show what moves onto them.
        nowhere = places.new_tensor(n**2 + 1)
        before = places.clone()
        for cell in set(after) - set(cells):
            places[before == cell] = nowhere
        for cell, target in zip(cells, after, strict=True):
            places[before == cell] = target

    def _cells(self, env: BoxWorld, token: int) -> list[int]:
        """Return the cells that move with a token: one, or both of a box."""
        places = env.token_places(0).tolist()
        cell = places[token] if token < len(places) else 0
        code = int(env.codes[0, cell])
        if not 1 <= cell <= env.n**2 or code in (FLOOR, NOTHING):
            return []
        # A box is its content and, right of it, its lock.
        if code >= LOCK:
            return [cell - 1, cell]
        single = code == AGENT or code >= LOOSE
        return [cell] if single else [cell, cell + 1]


def scene_of(env: BatchedEnv) -> Scene[Any]:
    """Return the scene that fits an environment."""
    match env:
        case ParticleEnv():
            return ParticleScene()
        case CartPole():
            return CartPoleScene()
        case BoxWorld():
            return BoxWorldScene()
    return Scene()


def rounded(tensor: Tensor) -> list[Any]:
    """Convert to lists of numbers with four decimals, enough for a page.

    NaN, which environments may leave under padding and which JSON lacks, becomes 0.
    """
    return (tensor.double() * 1e4).round().div(1e4).nan_to_num().tolist()
