"""The ceiling of simple centroid: a controller that knows which tokens count."""

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
    r"""Go to the signal's centroid, dead-beat, by what the tokens show.

    A force moves an agent two steps later. With d and w the signal's mean position
    and velocity relative to the agent, the force after which the agent stands on
    the centroid two steps on, if nothing else pushes, is

    .. math:: F = \bigl(d + (2 - damping)\,dt\,w\bigr) / dt^2

    cut to what the action space allows. Padded tokens and noise are ignored; without
    a signal token there is no force. Agent and signal damp alike, so that w is all
    that is needed to know of velocities.

    Args:
        group: the agents' group, for its action space.
        steps_ahead: 2 as above; 1 puts 1 for the 2 in F, as if the force moved the
            agent at once. That controller overshoots and circles at a distance of
            about 0.1; it is the ceiling that earlier measurements used.

    Raises:
        InputError: ``steps_ahead`` is neither.
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
        """Decide; ``logits`` are the force before it is cut. See `Policy.act`."""
        force = self.force(tokens)
        none = force.new_zeros(tokens.batch_shape)
        return Decision(self.steering.toward(force), none, none, force, state)

    def force(self, tokens: Tokens) -> Tensor:
        """The force ``(*B, 2)`` that takes the agents to the centroid."""
        signal = (tokens.types == TYPE_NAMES.index("signal")) & ~tokens.padding
        # What lies under padding may be NaN, so it is replaced, not multiplied away.
        kept = torch.where(signal[..., None], tokens.features, 0.0)
        count = signal.sum(-1, keepdim=True).clamp(min=1)
        mean = kept.sum(-2) * (FEATURE_SCALE / count)
        return (mean[..., :2] + self.lead * mean[..., 2:]) / DT**2
