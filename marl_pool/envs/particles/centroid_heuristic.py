"""Reference controller of simple centroid, which uses the token types."""

from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.particles.actions import Steering
from marl_pool.envs.particles.physics import DAMPING, DT
from marl_pool.envs.particles.simple_centroid import (
    AGENT_ACCELERATION,
    FEATURE_SCALE,
    TYPE_NAMES,
)
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream


class CentroidHeuristic(Policy):
    r"""Dead-beat controller that steers to the centroid of the signal tokens.

    A force changes an agent's position two steps later. With d and w the mean position
    and velocity of the signal relative to the agent, the force that puts the agent on
    the centroid in two steps, if no other force acts, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    clipped to the action space. Agent and signal have the same damping, so only the
    relative velocity w enters. Noise and padded tokens are ignored; without a signal
    token the force is zero.

    Args:
        group: the group of agents that it controls.
        steps_ahead: 2 as above. With 1 the factor is (1 - damping), as if the force
            moved the agent at once: it overshoots and circles at a distance of about
            0.1. Earlier measurements used it as the reference.

    Raises:
        InputError: ``steps_ahead`` is not 1 or 2.
    """

    def __init__(self, group: AgentGroup, steps_ahead: Literal[1, 2] = 2) -> None:
        super().__init__()
        if steps_ahead not in (1, 2):
            raise InputError(f"steps_ahead: expected 1 or 2, got {steps_ahead!r}")
        continuous = isinstance(group.action_space, spaces.Box)
        self.steering = Steering(AGENT_ACCELERATION, continuous)
        self.lead = (steps_ahead - DAMPING) * DT
        self.config: dict[str, Any] = {"steps_ahead": steps_ahead}

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """See `Policy.act`; ``logits`` are the force before it is clipped."""
        force = self.force(tokens)
        none = force.new_zeros(tokens.batch_shape)
        return Decision(self.steering.toward(force), none, none, force, state)

    def force(self, tokens: Tokens) -> Tensor:
        """Return the force ``(*B, 2)`` toward the centroid, before it is clipped."""
        signal = (tokens.types == TYPE_NAMES.index("signal")) & ~tokens.padding
        # Padded slots may hold NaN, so replace them instead of multiplying by zero.
        kept = torch.where(signal[..., None], tokens.features, 0.0)
        count = signal.sum(-1, keepdim=True).clamp(min=1)
        mean = kept.sum(-2) * (FEATURE_SCALE / count)
        return (mean[..., :2] + self.lead * mean[..., 2:]) / DT**2
