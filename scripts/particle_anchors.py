"""Policies for particle tasks that do not learn and are not in the package."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.particles.heuristics import ForceHeuristic
from marl_pool.envs.particles.mpev2_heuristics import least_pairs
from marl_pool.envs.particles.physics import dead_beat
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import Tokens


class Rest(Heuristic):
    """The choice to do nothing."""

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        choices = torch.zeros_like(tokens.types[..., 0])
        return choices, choices[..., None].float()


class LeastTotal(ForceHeuristic):
    """Steer in simple spread by the current assignment of least total distance."""

    acceleration = 5.0

    @override
    def force(self, tokens: Tokens) -> Tensor:
        count = (tokens.num_tokens + 1) // 2
        # Self, landmarks, other agents; the observer is the first agent.
        landmarks = tokens.features[..., 1 : 1 + count, :]
        agents = torch.cat(
            (tokens.features[..., :1, :], tokens.features[..., 1 + count :, :]), -2
        )
        away = landmarks[..., None, :, :2] - agents[..., :, None, :2]
        partners = least_pairs(torch.hypot(away[..., 0], away[..., 1]))
        goal = partners[..., :1, None].expand(*partners.shape[:-1], 1, 4)
        target = landmarks.gather(-2, goal)[..., 0, :]
        return dead_beat(target)
