"""Reference controller of cartpole: swing up by energy, then balance."""

from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.cartpole.env import (
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
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import Tokens

# Found by a random search over a few hundred environments.
PUMP = 16.0
"""Acceleration of the cart per unit of missing energy, in m/s²."""
CENTER, DAMP = 6.0, 4.0
"""Acceleration toward the middle per unit of position and of velocity."""
CATCH = 70.0
"""Cost to go below which the regulator takes over."""
BRAKING = 7.0
"""Assumed deceleration of a braking cart in m/s²."""
LAST_STOP = 1.9
"""Largest distance from the middle at which a cart may come to rest, in meters."""

STATE_COSTS = (1.0, 0.1, 1.0, 0.1)
"""Costs of the squared position, velocity, angle and angular velocity."""
ACTION_COST = 0.1


class CartPoleHeuristic(Heuristic):
    r"""Balance if the pole is near upright, else brake near the ends, else swing up.

    *Balance* is the linear-quadratic regulator of the upright pole, used where its
    cost to go, quadratic in the state, is below a bound. *Brake* is full force toward
    the middle, used where the cart would otherwise come to rest too far out.
    *Swing up* gives the cart the acceleration
    :math:`-k e \tanh(2 \dot\theta \cos\theta)` plus a pull to the middle, with e the
    pole's energy less its energy upright at rest, in units of
    :math:`m g l / 2` (Åström and Furuta, Swinging up a pendulum by energy control,
    2000).

    The five channels are read from the newest frame of the first five tokens, by
    position, so it is not a reference for shuffled tokens. A padded token counts as 0.
    `Decision.logits` are the action before it is clipped.

    Args:
        group: the group of the agent.
    """

    gain: Tensor
    cost: Tensor

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        for name, matrix in zip(("gain", "cost"), regulator(), strict=True):
            buffer = matrix.to(torch.get_default_dtype())
            self.register_buffer(name, buffer, persistent=False)

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        features = tokens.features[..., :5, -1].to(self.gain.dtype)
        # Padded slots may hold NaN, so replace them instead of multiplying by zero.
        readings = torch.where(tokens.padding[..., :5], 0.0, features)
        action = self.decide(readings)[..., None]
        return action.clamp(-1, 1), action

    def decide(self, readings: Tensor) -> Tensor:
        """Compute the action ``(*B,)`` from the channels ``(*B, 5)``."""
        position, velocity, cos, sin, turn = readings.unbind(-1)
        swing = _swing(position, velocity, cos, sin, turn)
        # Brake where the cart would come to rest too far out.
        # The square of the speed over twice the deceleration is the braking distance.
        stop = position + velocity * velocity.abs() / (2 * BRAKING)
        action = torch.where(stop.abs() > LAST_STOP, -stop.sign(), swing)
        # Balance where the regulator's cost to go is low.
        errors = torch.stack((position, velocity, torch.atan2(sin, cos), turn), -1)
        balance = -(errors @ self.gain)
        caught = ((errors @ self.cost) * errors).sum(-1) < CATCH
        return torch.where(caught, balance, action)


def _swing(
    position: Tensor, velocity: Tensor, cos: Tensor, sin: Tensor, turn: Tensor
) -> Tensor:
    # Energy in units of the pole's weight times half its length, 0 at rest upright.
    energy = turn.square() * (POLE_LENGTH / (3 * GRAVITY)) + cos - 1
    acceleration = -PUMP * energy * torch.tanh(2 * turn * cos)
    acceleration = acceleration - CENTER * position - DAMP * velocity
    # The acceleration is linear in the force.
    drift, _ = accelerations(velocity, cos, sin, turn, torch.zeros_like(cos))
    inertia = TOTAL_MASS - 0.75 * POLE_MASS * cos.square()
    return (acceleration - drift) * inertia / MAX_FORCE


@cache
def regulator(steps: int = 1000) -> tuple[Tensor, Tensor]:
    """Solve the regulator of the upright pole by value iteration over ``steps``.

    Returns:
        Its gains ``(4,)`` and the quadratic form ``(4, 4)`` of its cost to go, float64,
        for position, velocity, angle and angular velocity.
    """
    # Linearise the equations of motion at the upright pole.
    inertia = TOTAL_MASS - 0.75 * POLE_MASS
    cart = torch.tensor([0.0, -FRICTION, 0.75 * POLE_MASS * GRAVITY, 0.0]).double()
    cart = cart / inertia
    pole = LEVER * cart
    pole[2] += LEVER * GRAVITY
    rates = torch.stack((_unit(1), cart, _unit(3), pole))
    push = MAX_FORCE / inertia * (_unit(1) + LEVER * _unit(3))[:, None]
    # Discretize in time, and iterate the Riccati equation.
    a, b = torch.eye(4).double() + DT * rates, DT * push
    costs = torch.tensor(STATE_COSTS).double().diag()
    cost = costs
    for _ in range(steps):
        gain = (b.T @ cost @ a) / (ACTION_COST + b.T @ cost @ b)
        cost = costs + a.T @ cost @ (a - b @ gain)
    return gain[0], cost


def _unit(place: int) -> Tensor:
    return torch.eye(4, dtype=torch.float64)[place]
