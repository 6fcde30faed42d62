"""CartPole swing-up: unlabeled sensor channels as tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Unpack

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, BatchedEnv, EnvOptions
from marl_pool.envs.drawing import canvas
from marl_pool.options.types import (
    Episodes,
    NonNegativeFloat,
    Repeats,
    Size,
    SizeOrZero,
)
from marl_pool.tokens import Tokens, TokenSpec

CHANNELS = ("position", "velocity", "cos", "sin", "angular_velocity")
"""Names of the sensor channels, in the order of the tokens."""
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

SHORT = {"position": "x", "velocity": "x'", "angular_velocity": "th'"}
"""Names in pictures, where they differ."""

Point = tuple[float, float]
EXTENT = 2.8
RAIL = 1.0
"""Height of the track in the image; the bars are below."""
CART: Point = (0.2, 0.1)
"""Half the width and height of the cart."""
FLOOR, HEIGHT = -2.0, 1.6
"""Position of the bars, and the height of the highest bar."""

Angle = Annotated[
    float, Field(ge=0, le=math.pi, description="an angle in [0, pi] radians")
]


class CartPole(BatchedEnv):
    r"""Swing a pole up and balance it with unlabeled sensor channels.

    A cart on a track of 4.8 m is pushed by 10 N times the action, a number in
    [-1, 1]. The pole starts nearly hanging, at random speeds, and has to be balanced
    upright over the middle of the track:

    .. math:: r = \frac{\cos\theta + 1}{2} \cos\Bigl(\frac{\pi}{2} \frac{x}{2.4}\Bigr)

    computed from the new state. An episode terminates when :math:`|x| > 2.4`, and is
    truncated after ``max_steps`` steps of 0.01 s. Position and angle advance with the
    old velocities (explicit Euler). The initial state is uniform: position in
    [-2.4, 2.4], velocities in [-10, 10], angle within :math:`\pi / 2` of hanging. From
    many initial states the cart inevitably leaves the track. Slower and more upright
    starts make the task easier (``start_speed``, ``start_angle``).

    Each of the five channels (:math:`x, \dot x, \cos\theta, \sin\theta, \dot\theta`)
    is one token. All tokens have the same type, none is the agent's own, and none has
    an index or a position. So a permutation-invariant policy without memory cannot
    solve the task, because it cannot distinguish the angle from the position. A memory
    (AttentionNeuron), or at least ``num_frames``, lets it infer the meaning of a
    channel from its changes; ``channel_ids`` is the control with labeled channels. The
    order of the tokens is fixed: shuffling is a perturbation.

    Source: ``CartPoleSwingUpHarder`` of `Tang and Ha, 2021
    <https://arxiv.org/abs/2109.02869>`_, section 4.1, with the numbers of its published
    code. The paper lists the angle as the fifth channel; the code has the angular
    velocity, as here. Its evaluation with duplicates ("10 obs") and noise channels
    ("5 obs + 5 noise") uses an agent that was trained without them and halves its codes
    (footnote 3), as ``suite=attention_neuron`` does here.

    Args:
        duplicates: number of copies of each channel; all channels in order, then all
            again.
        noise_channels: number of further tokens of pure noise.
        noise_std: standard deviation of their Gaussian noise, sampled in each step.
        num_frames: consecutive readings of a channel in a token's features, the newest
            last; the first reading of an episode pads the history.
        channel_ids: True to give each channel a separate type; duplicates have equal
            types.
        start_speed: largest initial velocity, of the cart in m/s and of the pole in
            rad/s.
        start_angle: largest initial angle from hanging in radians.
    """

    steps_past_end = shows_state = has_token_order = True
    state_names = ("state", "past")

    state: Tensor
    """``(num_envs, 5 + noise_channels + 1)``: the channels, the noise, the angle."""
    past: Tensor
    """``(num_envs, 5 + noise_channels, num_frames - 1)`` earlier readings."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        duplicates: Size = 1,
        noise_channels: SizeOrZero = 0,
        noise_std: NonNegativeFloat = 0.1,
        num_frames: Repeats = 1,
        channel_ids: bool = False,
        start_speed: NonNegativeFloat = 10.0,
        start_angle: Angle = math.pi / 2,
        max_steps: Episodes = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(
            num_envs, max_steps=max_steps, dynamics_size=noise_channels, **common
        )
        self.noise_channels = noise_channels
        self.noise_std, self.num_frames = noise_std, num_frames
        self.start_speed, self.start_angle = start_speed, start_angle
        sensors, channels = len(CHANNELS), len(CHANNELS) + noise_channels
        # Tokens are the channels, their duplicates, then the noise.
        order = [*range(sensors)] * duplicates + [*range(sensors, channels)]
        self._token_channels = order
        self._order = self._constant(order, torch.int64)
        # Without ids all tokens have the type 0.
        self._types = self._order * channel_ids
        # Initial states are sampled within this scale.
        self._scale = self._constant((TRACK, start_speed, start_angle, start_speed))
        token_names = self.channel_names()
        spec = TokenSpec(
            len(token_names),
            num_frames,
            tuple(dict.fromkeys(token_names)) if channel_ids else ("channel",),
            has_self=False,
            signal_types=CHANNELS if channel_ids else (),
            positions=(),
            num_frames=num_frames,
        )
        action = spaces.Box(-1, 1, (1,), np.float32)
        self.groups = {"agent": AgentGroup(1, spec, action)}
        # Allocate the state and the earlier frames of each channel.
        empty = self._scale.new_zeros(num_envs, channels + 1)
        self._bind(empty, empty.new_zeros(num_envs, channels, num_frames - 1))

    @property
    def angle(self) -> Tensor:
        """Angle of the pole from upright in radians, ``(num_envs,)``; left positive."""
        return self.state[:, -1]

    @override
    def observe(self) -> dict[str, Tokens]:
        """Return tokens ``(num_envs, 1, N)``; their types and padding are shared."""
        if self.num_frames == 1:
            features = self.state.index_select(1, self._order)
        else:
            frames = torch.cat((self.past, self._channels()[..., None]), 2)
            features = frames.index_select(1, self._order)
        features = features.view(*self._batch_types.shape, self.num_frames)
        return {"agent": Tokens(features, self._batch_types, self._batch_padding)}

    def channel_names(self) -> list[str]:
        """Return the channel of each token: one of `CHANNELS`, or ``noise_0``, …."""
        names = [*CHANNELS, *(f"noise_{i}" for i in range(self.noise_channels))]
        return [names[i] for i in self._token_channels]

    @override
    def signal(self) -> dict[str, Tensor]:
        is_signal = self._order < len(CHANNELS)
        return {"agent": is_signal.expand_as(self._batch_padding)}

    def put(self, rows: Tensor, start: Tensor) -> None:
        """Set the states of ``rows`` ``(n,)``, and fill their history with them.

        ``start`` ``(n, 4)`` is position, velocity, angle and angular velocity.
        """
        position, velocity, angle, angular_velocity = start.to(self.dtype).unbind(1)
        sensed = (position, velocity, angle.cos(), angle.sin(), angular_velocity)
        self.state[rows, : len(CHANNELS)] = torch.stack(sensed, 1)
        self.state[rows, -1] = angle
        self.past[rows] = self._channels()[rows, :, None]

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        frame = CartPoleFrame(canvas.Projection(EXTENT, size))
        frame.cart(float(self._position[index]), float(self._angle[index]))
        if weights is not None:
            frame.bars(self.channel_names(), weights)
        return frame.image

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        uniform = self.sample_uniform(keys, len(self._scale) + self.noise_channels)
        start, noise = uniform.split([len(self._scale), self.noise_channels], 1)
        self.state[rows, len(CHANNELS) : -1] = self._gaussian(noise)
        start = (2 * start - 1) * self._scale
        # The pole starts around hanging down; its angle is from upright.
        start[:, 2] += math.pi
        self.put(rows, start)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        # Keep the readings before the step as the newest of the past.
        if self.num_frames > 1:
            newest = self._channels()[..., None]
            self.past = torch.cat((self.past[..., 1:], newest), 2)
        action = actions["agent"].detach().to(self.dtype).reshape(-1)
        force = action.clamp(-1, 1).mul_(MAX_FORCE)
        self._move(force)
        if self.noise_channels:
            self._noise.copy_(self._gaussian(self.dynamics.next()))
        # The reward is 1 for an upright pole over the middle of the track.
        upright = self._cos.add(1).mul_(0.5)
        centered = self._position.mul(math.pi / (2 * TRACK)).cos_()
        rewards = upright.mul_(centered)[:, None]
        return {"agent": rewards}, self._position.abs() > TRACK

    def _move(self, force: Tensor) -> None:
        """Advance by explicit Euler: positions with the old velocities."""
        velocity, angular_velocity = self._velocity, self._angular_velocity
        acceleration, turn = accelerations(
            velocity, self._cos, self._sin, angular_velocity, force
        )
        self._position.add_(velocity, alpha=DT)
        self._angle.add_(angular_velocity, alpha=DT)
        velocity.add_(acceleration, alpha=DT)
        angular_velocity.add_(turn, alpha=DT)
        # In place, since these are rows of the state.
        torch.cos(self._angle, out=self._cos)
        torch.sin(self._angle, out=self._sin)

    def _gaussian(self, uniform: Tensor) -> Tensor:
        # The quantile function takes one number for each sample.
        return torch.special.ndtri(uniform).mul_(self.noise_std)

    def _channels(self) -> Tensor:
        """Return the newest readings, ``(num_envs, 5 + noise_channels)``, as a view."""
        return self.state[:, :-1]

    def _bind(self, state: Tensor, past: Tensor) -> None:
        # Each channel is contiguous, which makes a step several times faster.
        rows = state.t().contiguous()
        self.state, self.past = rows.t(), past
        self._position, self._velocity, self._cos, self._sin = rows[:4]
        self._angular_velocity, self._angle = rows[4], rows[-1]
        self._noise = self.state[:, len(CHANNELS) : -1]
        types = self._types.expand(len(state), 1, -1)
        self._batch_types = types.contiguous()
        self._batch_padding = torch.zeros_like(self._batch_types, dtype=torch.bool)

    @override
    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._bind(tensors["state"], tensors["past"])


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

    All quantities are in SI units and of the same shape.
    """
    # Only new tensors are changed in place, not the arguments.
    pull = (cos * (3 * POLE_MASS * GRAVITY)).sub_(
        angular_velocity.square(), alpha=2 * POLE_MASS * POLE_LENGTH
    )
    push = (force * 4).sub_(velocity, alpha=4 * FRICTION).addcmul_(sin, pull)
    inertia = cos.square().mul_(-3 * POLE_MASS).add_(4 * TOTAL_MASS)
    acceleration = push.div_(inertia)
    turn = (sin * (LEVER * GRAVITY)).addcmul_(cos, acceleration, value=LEVER)
    return acceleration, turn


class CartPoleFrame(canvas.Frame):
    """A `Frame` with a cart, and a bar for the attention to each token."""

    def cart(self, position: float, angle: float) -> None:
        """Draw the track, and the cart with its pole at ``angle`` from upright."""
        stop = CART[1]
        # Draw the track between its stops.
        for end in (-TRACK, TRACK):
            self._stroke((end, RAIL - stop), (end, RAIL + stop), canvas.INK, 3)
        self._stroke((-TRACK, RAIL), (TRACK, RAIL), canvas.INK, 2)
        # Draw the cart.
        half_width, half_height = CART
        low = (position - half_width, RAIL - half_height)
        self._box(low, (position + half_width, RAIL + half_height), canvas.BLUE)
        # Draw the pole and its pivot.
        tip = (
            position - POLE_LENGTH * math.sin(angle),
            RAIL + POLE_LENGTH * math.cos(angle),
        )
        width = max(2, round(self.projection.pixels(0.06)))
        self._stroke((position, RAIL), tip, canvas.VERMILION, width)
        (pivot,) = self.projection.project(np.array([(position, RAIL)]))
        canvas.draw_disc(self.image, pivot, self.projection.pixels(0.05), canvas.INK)

    def bars(self, names: Sequence[str], weights: np.ndarray) -> None:
        """Draw a bar for each attention weight.

        The horizontal line is the weight of uniform attention, 1 over the number of
        tokens. The highest bar is `FOCUS` times that weight or more.
        """
        slot = 2 * TRACK / len(names)
        heights = HEIGHT * np.clip(weights * len(names) / canvas.FOCUS, 0, 1)
        for place, (name, height) in enumerate(zip(names, heights, strict=True)):
            middle = -TRACK + (place + 0.5) * slot
            low, high = middle - 0.3 * slot, middle + 0.3 * slot
            self._box((low, FLOOR), (high, FLOOR + HEIGHT), canvas.GRID)
            self._box((low, FLOOR), (high, FLOOR + height), canvas.ATTENTION)
            self._name(SHORT.get(name, name.replace("noise_", "n")), middle, slot)
        uniform = FLOOR + HEIGHT / canvas.FOCUS
        self._stroke(
            (-TRACK, uniform), (TRACK, uniform), canvas.blend(canvas.INK, 0.5), 1
        )

    def _name(self, name: str, middle: float, slot: float) -> None:
        # A letter is about half as wide as its line is high.
        room = self.projection.pixels(slot) / max(0.55 * len(name), 1)
        line = round(min(self.projection.size / 28, room))
        ((x, y),) = self.projection.project(np.array([(middle, FLOOR)]))
        start = round(x - 0.25 * line * len(name))
        canvas.write(self.image, name, (start, round(y + line)), line)

    def _stroke(
        self, first: Point, last: Point, color: canvas.Color, width: int
    ) -> None:
        ends = self.projection.project(np.array([first, last]))
        canvas.draw_line(self.image, ends, color, width)

    def _box(self, low: Point, high: Point, color: canvas.Color) -> None:
        corners = self.projection.project(np.array([low, high]))
        first, last = (canvas.fixed(corner) for corner in corners)
        cv2 = canvas.opencv()
        cv2.rectangle(self.image, first, last, color, -1, cv2.LINE_AA, canvas.SHIFT)
