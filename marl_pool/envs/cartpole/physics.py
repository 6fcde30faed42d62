"""Constants and equations of motion of the cart-pole."""

from torch import Tensor

DT = 0.01
"""Duration of a step in seconds."""
GRAVITY = 9.82
CART_MASS = 0.5
POLE_MASS = 0.5
POLE_LENGTH = 0.6
FRICTION = 0.1
"""Force of friction on the cart per unit of its velocity."""
MAX_FORCE = 10.0
TRACK = 2.4
"""Half the length of the track in meters."""

TOTAL_MASS = CART_MASS + POLE_MASS
LEVER = 3 / (2 * POLE_LENGTH)


def accelerations(
    velocity: Tensor, cos: Tensor, sin: Tensor, angular_velocity: Tensor, force: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Compute the accelerations of the cart and of the pole's angle.

    The pole is a uniform rod at the angle :math:`\theta` from upright, which grows to
    the left:

    .. math::
        \ddot x &= \frac{3 m g \sin\theta \cos\theta - 2 m l \dot\theta^2 \sin\theta
            + 4 (F - b \dot x)}{4 (M + m) - 3 m \cos^2 \theta} \\
        \ddot\theta &= \frac{3}{2 l} (g \sin\theta + \ddot x \cos\theta)

    These are the equations of Deisenroth and Rasmussen, PILCO (2011), with the angle
    rotated by half a turn.

    All are in SI units and of one shape.
    """
    pull = (cos * (3 * POLE_MASS * GRAVITY)).sub_(
        angular_velocity.square(), alpha=2 * POLE_MASS * POLE_LENGTH
    )
    push = (force * 4).sub_(velocity, alpha=4 * FRICTION).addcmul_(sin, pull)
    inertia = cos.square().mul_(-3 * POLE_MASS).add_(4 * TOTAL_MASS)
    acceleration = push.div_(inertia)
    turn = (sin * (LEVER * GRAVITY)).addcmul_(cos, acceleration, value=LEVER)
    return acceleration, turn
