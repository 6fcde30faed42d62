"""A controller for cartpole that knows the channels: pump energy, then balance."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.cartpole.physics import (
    DT,
    FRICTION,
    GRAVITY,
    LEVER,
    MAX_FORCE,
    POLE_LENGTH,
    POLE_MASS,
    TOTAL_MASS,
    accelerations,
)
from marl_pool.policies.base import Decision, Policy, State
from marl_pool.tokens import Tokens
from marl_pool.utils.randomness import Stream

# Found by a random search over a few hundred worlds.
PUMP = 16.0
"""Acceleration of the cart for each unit of missing energy, in m/s²."""
CENTER, DAMP = 6.0, 4.0
"""Acceleration to the middle for each unit of position and of velocity."""
CATCH = 70.0
"""The balancer's cost to go, below which it takes over."""
BRAKING = 7.0
"""Deceleration, in m/s², that a cart on its way to the end is reckoned to have."""
LAST_STOP = 1.9
"""How far from the middle a cart may come to rest."""

STATE_COSTS = (1.0, 0.1, 1.0, 0.1)
"""Of position, velocity, angle and angular velocity, each squared."""
ACTION_COST = 0.1


class CartPoleHeuristic(Policy):
    r"""Balance where that can be done, else brake where one must, else swing up.

    *Balance* is the linear-quadratic regulator of the upright pole. It can be done
    where the regulator's cost to go, quadratic in the state, is small. *Brake* is
    full force to the middle, where the cart would else come to rest too far out.
    *Swing up* gives the cart the acceleration
    :math:`-k e \tanh(2 \dot\theta \cos\theta)` plus a pull to the middle, with e the
    pole's energy less that of the pole upright at rest, in units of
    :math:`m g l / 2` (Åström and Furuta, Swinging up a pendulum by energy control,
    2000).

    It takes its readings from the first five tokens by their place, the newest frame of
    each, so it is no ceiling where tokens are shuffled. A padded token reads 0.

    Args:
        group: the agent's group.
    """

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.gain: Tensor
        self.cost: Tensor
        gain, cost = regulator()
        dtype = torch.get_default_dtype()
        self.register_buffer("gain", gain.to(dtype), persistent=False)
        self.register_buffer("cost", cost.to(dtype), persistent=False)

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide; ``logits`` are the action before it is cut. See `Policy.act`."""
        seen = tokens.features[..., :5, -1].to(self.gain.dtype)
        # What lies under padding may be NaN, so it is replaced, not multiplied away.
        readings = torch.where(tokens.padding[..., :5], 0.0, seen)
        wanted = self.decide(readings)[..., None]
        none = wanted.new_zeros(tokens.batch_shape)
        return Decision(wanted.clamp(-1, 1), none, none, wanted, state)

    def decide(self, readings: Tensor) -> Tensor:
        """The action ``(*B,)`` for the readings ``(*B, 5)`` of the channels."""
        position, velocity, cos, sin, turn = readings.unbind(-1)
        swing = _swing(position, velocity, cos, sin, turn)
        rest = position + velocity * velocity.abs() / (2 * BRAKING)
        action = torch.where(rest.abs() > LAST_STOP, -rest.sign(), swing)
        errors = torch.stack((position, velocity, torch.atan2(sin, cos), turn), -1)
        balance = -(errors @ self.gain)
        caught = ((errors @ self.cost) * errors).sum(-1) < CATCH
        return torch.where(caught, balance, action)


def _swing(
    position: Tensor, velocity: Tensor, cos: Tensor, sin: Tensor, turn: Tensor
) -> Tensor:
    energy = turn.square() * (POLE_LENGTH / (3 * GRAVITY)) + cos - 1
    wanted = -PUMP * energy * torch.tanh(2 * turn * cos)
    wanted = wanted - CENTER * position - DAMP * velocity
    # The acceleration is linear in the force.
    drift, _ = accelerations(velocity, cos, sin, turn, torch.zeros_like(cos))
    inertia = TOTAL_MASS - 0.75 * POLE_MASS * cos.square()
    return (wanted - drift) * inertia / MAX_FORCE


@cache
def regulator(steps: int = 1000) -> tuple[Tensor, Tensor]:
    """Solve the regulator of the upright pole by value iteration.

    Args:
        steps: that it looks ahead.

    Returns:
        Its gains ``(4,)`` and the quadratic form ``(4, 4)`` of its cost to go, float64,
        for position, velocity, angle and angular velocity.
    """
    inertia = TOTAL_MASS - 0.75 * POLE_MASS
    cart = torch.tensor([0.0, -FRICTION, 0.75 * POLE_MASS * GRAVITY, 0.0]).double()
    cart = cart / inertia
    pole = LEVER * cart
    pole[2] += LEVER * GRAVITY
    rates = torch.stack((_unit(1), cart, _unit(3), pole))
    push = MAX_FORCE / inertia * (_unit(1) + LEVER * _unit(3))[:, None]
    a, b = torch.eye(4).double() + DT * rates, DT * push
    costs = torch.tensor(STATE_COSTS).double().diag()
    cost = costs
    for _ in range(steps):
        gain = (b.T @ cost @ a) / (ACTION_COST + b.T @ cost @ b)
        cost = costs + a.T @ cost @ (a - b @ gain)
    return gain[0], cost


def _unit(place: int) -> Tensor:
    return torch.eye(4, dtype=torch.float64)[place]
