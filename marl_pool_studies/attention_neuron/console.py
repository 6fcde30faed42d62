"""A game of Pong whose console memory can be read.

The memory determines where the ball arrives, and the targets of an auxiliary head.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from marl_pool.envs.pong.emulator import NOOP

# Addresses in the console's RAM, found by comparison with the pixels.
BALL_X, PADDLE_Y, BALL_Y, VELOCITY_Y, VELOCITY_X = 49, 51, 54, 56, 58
KNOB = slice(4)
"""Bytes of a serialized emulator state that hold the position of our paddle's knob."""
KNOB_START, KNOB_PER_FRAME = 408_823, 23_000
"""The knob's position at the start, and its turn per emulated frame while pressed."""
PUSH = 5.73
"""Distance in rows by which one pressed frame moves the paddle's resting place."""
FIRST_REST = 109.0
"""Resting place of the paddle at the start of a game."""
PADDLE_COLUMN = 188
"""The value of ``ball_x`` at which the ball meets our paddle."""
OPPONENT_COLUMN = 65
"""The value of ``ball_x`` at which the ball meets the opponent's paddle."""
WALLS = (45.0, 206.5)
"""Values of ``ball_y`` at which the walls reflect the ball."""
SPEED_SCALE = 4.0
"""Pixels per frame by which the ball's velocity is divided."""


class GameState(NamedTuple):
    """Ball and paddle in the console's units, one for each pixel of 210 × 160.

    The paddle is 16 rows high. It lags behind the knob: it moves on to its resting
    place after the last press.
    """

    ball_x: int
    """The column of the ball's left edge on the screen, plus 49."""
    ball_y: int
    """The row of the ball's upper edge plus 14; 0 while there is no ball."""
    velocity_x: int
    """Columns per frame, positive towards our paddle; kept while there is no ball."""
    velocity_y: int
    """Rows per frame, positive downwards; kept while there is no ball."""
    paddle_y: int
    """The row of our paddle's upper edge plus 13."""
    rest: float
    """The value of ``paddle_y`` at which the paddle comes to rest without presses."""


TARGET_NAMES = ("crossing", "rest", "paddle", *GameState._fields[:4])
"""Names of the privileged targets, in the order of `privileged_targets`."""


class Console:
    """An emulated console that plays one game of Pong.

    The same seed, no-ops and actions lead to the same screens as in the games of the
    native vector environment. The arguments are options of `Pong`.
    """

    def __init__(self, frame_skip: int, sticky: float = 0.0) -> None:
        from ale_py import ALEInterface, LoggerMode

        self.frame_skip, self.sticky = frame_skip, sticky
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.emulator = ALEInterface()
        self.emulator.setFloat("repeat_action_probability", sticky)
        self._load_game(seed=0)  # the default seed is the time
        self._actions = self.emulator.getMinimalActionSet()

    @property
    def over(self) -> bool:
        """True once one side has 21 points."""
        return bool(self.emulator.game_over())

    def begin(self, noops: int, seed: int = 0) -> None:
        """Start a game by idle frames; only sticky actions use the ``seed``."""
        if self.sticky:  # without sticky actions the slow seeding has no effect
            self._load_game(seed)
        self.emulator.reset_game()
        for _ in range(noops):
            self.emulator.act(self._actions[NOOP])

    def step(self, action: int) -> int:
        """Play one of Pong's six actions; return points won minus points lost."""
        native_action, points = self._actions[action], 0
        for _ in range(self.frame_skip):
            points += self.emulator.act(native_action)
        return points

    def read(self) -> GameState:
        """Decode the console's memory."""
        ram = self.emulator.getRAM()
        serialized = self.emulator.cloneState().serialize()
        knob = int.from_bytes(serialized[KNOB], "little", signed=True)
        return GameState(
            ball_x=int(ram[BALL_X]),
            ball_y=int(ram[BALL_Y]),
            velocity_x=-_signed(ram[VELOCITY_X]),
            velocity_y=_signed(ram[VELOCITY_Y]),
            paddle_y=int(ram[PADDLE_Y]),
            rest=FIRST_REST + PUSH * ((knob - KNOB_START) / KNOB_PER_FRAME),
        )

    def _load_game(self, seed: int) -> None:
        """Rebuild the console, which is the only way to seed it."""
        from ale_py import roms

        rom: Any = roms.get_rom_path("pong")
        self.emulator.setInt("random_seed", seed)
        self.emulator.loadROM(rom)


def _signed(byte: int) -> int:
    return (int(byte) + 128) % 256 - 128


def approaches(state: GameState) -> bool:
    """Tell if the ball moves towards our paddle and has not passed it."""
    return state.ball_y > 0 and state.velocity_x > 0 and state.ball_x <= PADDLE_COLUMN


def crossing(state: GameState) -> float:
    r"""Predict the row at which an approaching ball meets the paddle.

    A ball at column x and row y with velocity (u, v) crosses the paddle's column h at

    .. math:: y + (h - x)\, v / u

    reflected at the walls.
    """
    low, high = WALLS
    frames = (PADDLE_COLUMN - state.ball_x) / state.velocity_x
    unfolded = state.ball_y + state.velocity_y * frames - low
    folded = unfolded % (2 * (high - low))
    return low + min(folded, 2 * (high - low) - folded)


def privileged_targets(state: GameState) -> np.ndarray:
    """Compute the auxiliary head's targets, ``(7,)`` float32 named in `TARGET_NAMES`.

    Positions are scaled to [-1, 1] over the range of the ball. Unknown targets are NaN:
    the ball's position and velocity while there is no ball, and its crossing unless it
    approaches.
    """
    width = PADDLE_COLUMN - OPPONENT_COLUMN
    ball = (
        2 * (state.ball_x - OPPONENT_COLUMN) / width - 1,
        _scaled(state.ball_y),
        state.velocity_x / SPEED_SCALE,
        state.velocity_y / SPEED_SCALE,
    )
    targets = (
        _scaled(crossing(state)) if approaches(state) else math.nan,
        _scaled(state.rest),
        _scaled(state.paddle_y),
        *(ball if state.ball_y > 0 else [math.nan] * len(ball)),
    )
    return np.array(targets, np.float32)


def _scaled(row: float) -> float:
    """Map rows between the walls to [-1, 1]."""
    low, high = WALLS
    return 2 * (row - low) / (high - low) - 1
