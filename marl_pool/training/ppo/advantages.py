"""Generalised advantage estimates on whole trajectories."""

import torch
from torch import Tensor

from marl_pool.rollout import Trajectory


def estimate_advantages(
    trajectory: Trajectory, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    r"""Estimate advantages and value targets.

    .. math::
        \hat A_t = \delta_t + \gamma \lambda \hat A_{t+1}, \qquad
        \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)

    The value target is :math:`\hat A_t + V(s_t)`. A truncation and the end of the
    fragment bootstrap from the value of the observation that followed; a termination
    and an agent's death do not.

    Source: Schulman et al., High-dimensional continuous control using generalized
    advantage estimation (2016), equation 16, https://arxiv.org/abs/1506.02438.

    Args:
        trajectory: fragment of ``T`` steps, with the values recorded while sampling.
        gamma: discount, in [0, 1].
        gae_lambda: λ, in [0, 1].

    Returns:
        Advantages and value targets, both ``(T, num_envs, agents)``.
    """
    ended = (trajectory.terminated | trajectory.truncated)[..., None]
    lives = trajectory.next_active
    # Bootstrap at a truncation, but not at a termination or death.
    bootstraps = lives & ~trajectory.terminated[..., None]
    next_values = torch.where(bootstraps, trajectory.next_values, 0.0)
    # Compute the temporal-difference errors.
    errors = trajectory.rewards + gamma * next_values - trajectory.values
    # Sum the errors backwards in time, within an episode and an agent's life.
    decay = gamma * gae_lambda * (lives & ~ended)
    advantages = torch.empty_like(errors)
    running = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        running = errors[t] + decay[t] * running
        advantages[t] = running
    # The value targets are the lambda-returns.
    return advantages, advantages + trajectory.values
