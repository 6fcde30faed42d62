"""Starts of entities in MPEv2's tasks, and forces of the scripted ones."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from marl_pool.envs.particles.mpev2 import MPEv2
from marl_pool.envs.particles.physics import DAMPING, DT

FLIGHT = 1.0
"""Distance to the nearest agent below which an adversary flees."""

# Starts: ``(*B, 2)`` from uniform numbers ``(*B, 2)``, as in `Kind.start`


def box(side: float) -> Callable[[Tensor], Tensor]:
    """Return a function whose starts are in a square of this half side."""
    return partial(_in_square, side=side)


def _in_square(numbers: Tensor, *, side: float) -> Tensor:
    return (2 * numbers - 1) * side


def corner(numbers: Tensor) -> Tensor:
    """Return starts in the upper left corner, a fifth of the square's side long."""
    place = 0.6 + 0.4 * numbers
    return torch.stack((-place[..., 0], place[..., 1]), -1)


def outside(numbers: Tensor) -> Tensor:
    """Return starts with both coordinates beyond a quarter of the half side."""
    signed = 2 * numbers - 1
    return signed.sign() * (0.25 + 0.75 * signed.abs())


# Scripts: forces ``(num_envs, n, 2)`` of a kind, as in `Kind.script`


def drive(displacement: Tensor, velocity: Tensor) -> Tensor:
    r"""Return forces of length at most 1 that aim at a displacement d in one step.

    .. math:: F = d / dt - (2 - damping)\,v, \quad \lVert F \rVert \le 1

    All are ``(*B, 2)``.
    """
    force = displacement / DT - (2 - DAMPING) * velocity
    length = torch.linalg.vector_norm(force, dim=-1, keepdim=True)
    return torch.where(length > 1, normalize(force, dim=-1), force)


def _nearest_agent(env: MPEv2, kind: str) -> tuple[Tensor, Tensor]:
    """Return each entity's way to the nearest agent, and the distance.

    They are ``(num_envs, n, 2)`` and ``(num_envs, n, 1)``.
    """
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
