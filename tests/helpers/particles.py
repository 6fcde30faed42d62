"""Particle environments: making and playing them, and their counterparts in mpe2."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from mpe2._mpe_utils.core import Agent, Landmark, World
from torch import Tensor

from marl_pool.envs import make_batched_env, make_heuristic
from marl_pool.envs.particles.physics import Entities, ParticleEnv
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout


def particles(name: str, num_envs: int, **options: Any) -> Any:
    """Make a particle environment, in float64 by default, and reset it."""
    env = make_batched_env(name, num_envs, **{"dtype": torch.float64, **options})
    assert isinstance(env, ParticleEnv)
    env.reset()
    return env


def no_op(env: ParticleEnv) -> dict[str, Tensor]:
    """Return discrete actions that do nothing."""
    return {
        name: torch.zeros(env.num_envs, group.num_agents, dtype=torch.int64)
        for name, group in env.groups.items()
    }


def actions_for(env: ParticleEnv, step: int) -> dict[str, Tensor]:
    """Return actions that depend only on the environment's id, the agent and step."""
    actions = {}
    for name, group in env.groups.items():
        agents = torch.arange(group.num_agents)
        if isinstance(group.action_space, spaces.Discrete):
            choice = 7 * env.env_ids[:, None] + 3 * agents + step // 3
            actions[name] = (choice % 11) % 5
        else:
            place = 5 * agents[:, None] + torch.arange(5.0, dtype=torch.float64)
            wave = torch.sin(7.0 * env.env_ids[:, None, None] + 3.0 * place + step)
            actions[name] = wave.to(env.dtype)
    return actions


def run(env: ParticleEnv, steps: int) -> tuple[Tensor, Tensor]:
    """Return the states and all rewards of ``steps`` steps."""
    states, rewards = [], []
    for step in range(steps):
        step_rewards = env.step(actions_for(env, step)).rewards
        rewards.append(torch.cat(list(step_rewards.values()), 1))
        states.append(env.state.clone())
    return torch.stack(states), torch.stack(rewards)


def mean_returns(
    name: str, num_envs: int, random: Iterable[str] = (), **options: Any
) -> dict[str, float]:
    """Return the groups' mean returns; those in ``random`` act at random."""
    env = make_batched_env(name, num_envs, **options)
    policies: dict[str, Policy] = {
        role: RandomPolicy(group.action_space)
        if role in random
        else make_heuristic(name, group, role=role)
        for role, group in env.groups.items()
    }
    returns = Rollout(env, policies).episodes().returns
    return {role: float(total.mean()) for role, total in returns.items()}


def mpe2_world(entities: Sequence[Entities], state: np.ndarray) -> World:
    """Build an mpe2 world of the same entities: the movable ones are its agents."""
    world = World()
    for kind, row in zip(entities, state, strict=True):
        body = Agent() if kind.movable else Landmark()
        body.movable, body.collide, body.size = kind.movable, kind.collide, kind.size
        body.max_speed, body.initial_mass = kind.max_speed, kind.mass
        if isinstance(body, Agent):
            body.silent, body.action.c = True, np.zeros(2)
        body.state.p_pos, body.state.p_vel = row[:2].copy(), row[2:].copy()
        (world.agents if kind.movable else world.landmarks).append(body)
    return world


def mpe2_step(world: World, forces: np.ndarray) -> np.ndarray:
    """Advance a world by the agents' forces; return its state."""
    for agent, force in zip(world.agents, forces, strict=True):
        agent.action.u = force
    world.step()
    return mpe2_state(world)


def mpe2_state(world: World) -> np.ndarray:
    """Return positions and velocities ``(entities, 4)``."""
    return np.stack([[*e.state.p_pos, *e.state.p_vel] for e in world.entities])
