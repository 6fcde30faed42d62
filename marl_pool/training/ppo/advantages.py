"""Generalised advantage estimates on whole trajectories."""

import torch
from torch import Tensor

from marl_pool.rollout import Trajectory


def estimate_advantages(
    trajectory: Trajectory, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and value targets.

    Source: Schulman et al. (2016), equation 16. A truncation and the fragment's end
    bootstrap from the value of the observation that followed; a termination and an
    agent's death do not.

    Args:
        trajectory: with the values that the sampling weights gave.
        gamma: discount, in [0, 1].
        gae_lambda: λ, in [0, 1].

    Returns:
        Advantages and value targets, both ``(T, num_envs, agents)``.
    """
    ended = (trajectory.terminated | trajectory.truncated)[..., None]
    lives = trajectory.next_active
    bootstraps = lives & ~trajectory.terminated[..., None]
    next_values = torch.where(bootstraps, trajectory.next_values, 0.0)
    errors = trajectory.rewards + gamma * next_values - trajectory.values
    decay = gamma * gae_lambda * (lives & ~ended)
    advantages = torch.empty_like(errors)
    running = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        running = errors[t] + decay[t] * running
        advantages[t] = running
    return advantages, advantages + trajectory.values
