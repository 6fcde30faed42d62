"""A scripted teacher for Pong that reads the console's memory.

Its tables hold the value of each action for returning the ball, also with sticky
actions.
"""

from functools import cache
from itertools import product

import numpy as np
import torch
from typing_extensions import override

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.pong.emulator import NOOP, UNKNOWN
from marl_pool.envs.pong.env import Pong
from marl_pool.policies.base import State
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.teacher import Teacher, TeacherLabel
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream
from marl_pool_studies.attention_neuron.console import (
    PADDLE_COLUMN,
    PUSH,
    TARGET_NAMES,
    Console,
    GameState,
    approaches,
    crossing,
    privileged_targets,
)

UP, DOWN = 2, 3
"""Native actions."""
DIRECTIONS = (0, 0, -1, 1, -1, 1)
"""Direction of each native action: 1 is down, -1 up. As indices of `SIGNS` and `MOVES`,
-1 is the last place."""
SIGNS = (0, 1, -1)
"""Directions of the moves: stay, down, up."""
MOVES = (NOOP, DOWN, UP)
"""Native actions of the controller, in the order of `SIGNS`."""
WAITING_ROW = 118
"""Resting place of the paddle while no ball approaches."""
WAITING_SCALE = 500.0
"""Pixels from the waiting row that cost one point while no ball approaches."""
TEMPERATURE = 0.015
"""Temperature in points: action values divided by it are logits."""
SPARE = 32
"""Number of controllers kept for environments other than those labelled last."""

# The grid of the tables.
CELL = PUSH / 3
"""Distance between neighboring grid points, in pixels."""
HALF_WIDTH = 40
"""Grid points on each side of the ball's crossing."""
OFFSETS = CELL * np.arange(-HALF_WIDTH, HALF_WIDTH + 1)
"""Grid points: paddle minus crossing, in pixels."""
FRAMES = 40
"""Largest number of emulated frames until the ball arrives."""

# The console's dynamics, measured.
LAG = 0.293
"""Share of the distance to its resting place that the paddle moves in a frame."""
HIT_RANGE = (-19.5, 3.6)
"""Offsets at which the paddle returns the ball."""
STEEP_OFFSETS = (-13.0, -1.0)
"""Below the first the ball leaves at two rows per frame downwards, above the second
upwards."""
DOWNWARD_WINS = ((0, 127),)
"""Crossings from which a steep downward shot wins."""
UPWARD_WINS = ((0, 69), (127, 165))
"""Crossings from which a steep upward shot wins."""
SHOTS = tuple(product((False, True), repeat=2))
"""Kinds of crossings: does a steep shot win downwards, and upwards?"""

# Values in points, where a winning shot has 1.
RETURN_VALUE, MISS_VALUE = 0.75, -1.0
PRESS_COST = 0.004
OFFSET_STD = 2.0
"""Standard deviation of the offset when the ball arrives, in pixels."""


class ValueController:
    """Mirror a game on a second console, and choose the action of highest value.

    An approaching ball that leaves the paddle at two rows per frame wins from some
    rows; no other return does. `action_values` estimates the probability that an action
    leads to such a return, or to a miss. While no ball approaches, the paddle goes to
    `WAITING_ROW`. Everything that the choice depends on is visible on the screen.
    """

    def __init__(self, frame_skip: int, sticky: float = 0.0) -> None:
        self.options = frame_skip, sticky
        self.console = Console(frame_skip, sticky)
        self.start: tuple[int, int] | None = None
        """No-ops and seed of the mirrored game; None before `begin`."""
        self.played = bytearray()
        """The native actions of the game so far."""
        self.action = NOOP
        """The native action that the controller chooses in the present state."""
        self.values = np.zeros(len(MOVES))
        """The value of each of `MOVES` in points; 0 after the end of the game."""

    def follow(self, start: tuple[int, int], actions: bytes) -> None:
        """Go to the state after native actions, from the present one if possible."""
        if self.start != start or not actions.startswith(self.played):
            self.begin(start)
        for action in actions[len(self.played) :]:
            self.step(action)

    def begin(self, start: tuple[int, int]) -> None:
        """Go to the start of a game, given its number of no-ops and its seed."""
        self.start, self.played = start, bytearray()
        self.console.begin(*start)
        self._choose()

    def step(self, action: int) -> None:
        """Follow an executed native action; it has no effect after the game's end."""
        self.played.append(action)
        if not self.console.over:
            self.console.step(action)
            self._choose()

    def _choose(self) -> None:
        self.state = self.console.read()
        frame_skip, sticky = self.options
        if self.console.over:
            self.values = np.zeros(len(MOVES))
        elif approaches(self.state):
            last = self.played[-1] if self.played else NOOP
            self.values = action_values(self.state, last, frame_skip, sticky)
        else:
            rests = self.state.rest + PUSH * frame_skip * np.array(SIGNS)
            self.values = -np.abs(rests - WAITING_ROW) / WAITING_SCALE
        self.action = MOVES[int(self.values.argmax())]


class ValueTableTeacher(Teacher):
    r"""Label the states of `Pong` environments with actions and their values.

    The teacher is not a policy, since it does not look at the screen. A second console
    for each game replays the same actions with the same seed and shows the ball and the
    paddle, and a table holds the value of each action there: `ValueController`.

    The executed actions may come from any player, so that the teacher can label the
    states that a student visits (`DAgger <https://arxiv.org/abs/1011.0686>`_). Its
    labels depend only on the game and its actions. Its logits are
    :math:`Q(s, a) / \tau` with action values Q in points and :math:`\tau` =
    `TEMPERATURE`; their margin is the cost of a wrong action. After the end of a game
    the action is a no-op and the logits are 0. Its targets are `privileged_targets`.
    """

    has_logits = True
    target_names = TARGET_NAMES
    envs = ("pong",)

    def __init__(self) -> None:
        self._controllers: dict[int, ValueController] = {}

    @override
    def label(
        self, env: BatchedEnv, tokens: Tokens, state: State, noise: Stream | None
    ) -> TeacherLabel:
        """Label the present states; see `Teacher.label`.

        Raises:
            InputError: the environment was never reset.
        """
        assert isinstance(env, Pong)
        if bool((env.noops == UNKNOWN).any()):
            raise InputError("pong: expected games that have begun, got none: reset it")
        # Find the controller of each game, or make one.
        numbers, options = env.env_ids.tolist(), (env.frame_skip, env.sticky_actions)
        controllers = {}
        for number in numbers:
            cached = self._controllers.get(number)
            if cached is None or cached.options != options:
                cached = ValueController(*options)
            controllers[number] = cached
        # Keep some others: training and validation environments alternate.
        idle = {k: v for k, v in self._controllers.items() if k not in controllers}
        self._controllers = {**dict(list(idle.items())[-SPARE:]), **controllers}
        # Replay each game's actions on its controller, then read the label.
        logs, steps = env.action_log.cpu().numpy(), env.steps.tolist()
        starts = zip(env.noops.tolist(), env.game_seeds.tolist(), strict=True)
        order = env.native_actions.tolist()
        actions, values, targets = [], [], []
        for number, start, row, count in zip(numbers, starts, logs, steps, strict=True):
            controller = controllers[number]
            controller.follow(start, row[:count].tobytes())
            actions.append([order.index(controller.action)])
            values.append([[controller.values[DIRECTIONS[native]] for native in order]])
            targets.append(privileged_targets(controller.state))
        return TeacherLabel(
            torch.tensor(actions, device=env.device),
            torch.tensor(values, dtype=torch.float32, device=env.device) / TEMPERATURE,
            (),
            torch.from_numpy(np.stack(targets))[:, None].to(env.device),
        )


def winning_shots(row: float) -> tuple[bool, bool]:
    """Tell if steep shots downwards and upwards win from a crossing."""
    down, up = (
        any(low <= row < high for low, high in rows)
        for rows in (DOWNWARD_WINS, UPWARD_WINS)
    )
    return down, up


def action_values(
    state: GameState, last: int, frame_skip: int, sticky: float
) -> np.ndarray:
    """Look up the values of staying, down and up, ``(3,)``, for an approaching ball.

    ``last`` is the previous native action.
    """
    # Offsets are relative to the row where the ball arrives.
    row = crossing(state)
    # Before the range of the tables, take their first entry of the same phase.
    frames_left = max((PADDLE_COLUMN - state.ball_x) // state.velocity_x, 1)
    if frames_left > FRAMES:
        frames_left -= -(-(frames_left - FRAMES) // frame_skip) * frame_skip
    shot = SHOTS.index(winning_shots(row))
    table = solve(frame_skip, sticky)[frames_left, shot, DIRECTIONS[last] % 3]
    rest_offset, paddle = state.rest - row, state.paddle_y - row
    if abs(rest_offset) > OFFSETS[-1]:  # beyond the grid: towards the ball
        return np.array([0.0, -rest_offset, rest_offset]) / 100
    return _interpolate(table, rest_offset, paddle)


def _interpolate(table: np.ndarray, rest_offset: float, paddle: float) -> np.ndarray:
    """Read a table ``(3, rest, paddle)`` bilinearly."""
    places = np.array([rest_offset, paddle]) / CELL + HALF_WIDTH
    places = np.clip(places, 0, 2 * HALF_WIDTH - 0.001)
    (i, j), (x, y) = places.astype(int), places % 1
    near, far = ((1 - y) * table[:, k, j] + y * table[:, k, j + 1] for k in (i, i + 1))
    return (1 - x) * near + x * far


@cache
def solve(frame_skip: int, sticky: float) -> np.ndarray:
    r"""Solve for the action values by backward induction.

    With n frames left, the previous move b, the resting place r and the paddle p

    .. math::

        Q_n(b, a, r, p) = \sum_k P(k)\, V_{n-m}(r', p') - c\, [a \ne 0]

    for m = ``frame_skip`` frames of one action, of which the first k repeat b with
    :math:`P(k) = s^k (1 - s)`, or :math:`s^m` for k = m; s is ``sticky``, c the cost of
    a press, and :math:`V_n(r, p) = \max_a Q_n(b', a, r, p)` with the move b' that was
    executed last. V at the ball's arrival is `_arrival_values`.

    Returns:
        ``(FRAMES + 1, shots, 3, 3, G, G)`` float32 by the frames left, the kind of
        crossing, the previous and the present move, and the grid points of the resting
        place and of the paddle.
    """
    # Solve from the arrival backwards, for each previous and present move.
    ends = np.stack([_arrival_values(*shot) for shot in SHOTS]).astype(np.float32)
    size = len(OFFSETS)
    values = np.zeros((FRAMES + 1, len(SHOTS), 3, 3, size, size), np.float32)
    # Coordinates of the grid: indices of the rest position, offsets of the paddle.
    rest_index, paddle = np.arange(size)[:, None], OFFSETS[None]
    for frames_left, last, action in product(range(1, FRAMES + 1), range(3), range(3)):
        frames = min(frames_left, frame_skip)
        total = values[frames_left, :, last, action]
        # Average over the number of frames for which the last action sticks.
        for stuck in range(frames + 1):
            # The dynamics are linear: paddle' = kept * paddle + gained * rest + shift.
            chance = sticky**stuck * (1 - sticky if stuck < frames else 1)
            moved, kept, gained, shift = _move(last, action, stuck, frames)
            place = kept * paddle + gained * OFFSETS[:, None] + shift
            place = np.clip(place / CELL + HALF_WIDTH, 0, size - 1.001)
            i, x = place.astype(int), (place % 1).astype(np.float32)
            # Take the value of the arrival, or the best value after this step.
            if frames_left <= frame_skip:
                low, high = ends[:, i], ends[:, i + 1]
            else:
                executed = action if stuck < frames else last
                after = values[frames_left - frame_skip, :, executed].max(1)
                to = np.clip(rest_index + moved, 0, size - 1)
                low, high = after[:, to, i], after[:, to, i + 1]
            # Interpolate between the two nearest offsets.
            total += chance * ((1 - x) * low + x * high)
        total -= PRESS_COST * (action > 0)
    return values


def _arrival_values(down: bool, up: bool) -> np.ndarray:
    """Compute the value of each offset ``(G,)`` where shots win at the arrival."""
    errors = np.linspace(-4, 4, 33)
    weights = np.exp(-(errors**2) / 2)
    offsets = OFFSETS[:, None] + OFFSET_STD * errors
    values = np.full_like(offsets, RETURN_VALUE)
    values[(offsets <= STEEP_OFFSETS[0]) & down] = 1.0
    values[(offsets >= STEEP_OFFSETS[1]) & up] = 1.0
    values[(offsets < HIT_RANGE[0]) | (offsets > HIT_RANGE[1])] = MISS_VALUE
    return np.asarray(values @ weights / weights.sum())


def _move(
    last: int, action: int, stuck: int, frames: int
) -> tuple[int, float, float, float]:
    """Compute the motion of the paddle if the first frames of an action stick.

    Returns:
        Grid points by which the resting place moves, and the coefficients of the new
        paddle position: of the old position, of the old resting place, and a shift.
    """
    kept, gained, shift, moved = 1.0, 0.0, 0.0, 0
    for frame in range(frames):
        kept, gained = (1 - LAG) * kept, (1 - LAG) * gained + LAG
        shift = (1 - LAG) * shift + LAG * moved * CELL
        moved += 3 * SIGNS[last if frame < stuck else action]
    return moved, kept, gained, shift
