"""One game of Pong whose memory can be read, and which can be saved and loaded."""

from typing import Any, NamedTuple

from marl_pool.envs.pong_simulator import NOOP

BALL_X, PADDLE_Y, BALL_Y, ALONG, ACROSS = 49, 51, 54, 56, 58
"""Where the console keeps what it knows, as compared with the pixels."""
KNOB = slice(4)
"""Where a serialized state keeps how far our paddle's knob is turned."""
STARTS_AT, A_FRAME = 408_823, 23_000
"""The knob when a game begins, and what pressing turns it in an emulated frame."""


class Field(NamedTuple):
    """What the console knows, in its own units, one a pixel of 210 × 160."""

    ball_x: int
    """49 more than the column of the ball's left edge on the screen."""
    ball_y: int
    """14 more than the row of its upper edge; 0 while there is no ball."""
    across: int
    """The ball's motion to the right, towards our paddle, a frame."""
    along: int
    """The ball's motion down, a frame. As the one across, it outlives the ball."""
    paddle_y: int
    """13 more than the row of our paddle's upper edge; it is 16 high."""


class Console:
    """An emulated console.

    Like the games of the native vector env, but one by one: the same seed, no-ops and
    actions lead to the same screens.

    Args:
        frame_skip: emulated frames that an action lasts.
        sticky: probability that a frame repeats the action before.

    Raises:
        ModuleNotFoundError: ale-py, of the extra ``atari``, is not installed.
    """

    def __init__(self, frame_skip: int, sticky: float = 0.0) -> None:
        self.frame_skip, self.sticky = frame_skip, sticky
        self.emulator = make_emulator(sticky)
        self._actions = self.emulator.getMinimalActionSet()

    @property
    def over(self) -> bool:
        """Whether one side has 21 points."""
        return bool(self.emulator.game_over())

    def begin(self, noops: int, seed: int = 0) -> None:
        """Start a game.

        Args:
            noops: single frames of doing nothing that come first.
            seed: of what sticky actions draw.
        """
        if self.sticky:  # or there is nothing to draw, and to seed is slow
            insert(self.emulator, seed)
        self.emulator.reset_game()
        for _ in range(noops):
            self.emulator.act(self._actions[NOOP])

    def step(self, action: int) -> int:
        """Play one of Pong's six actions; return points won less points lost."""
        act, chosen, points = self.emulator.act, self._actions[action], 0
        for _ in range(self.frame_skip):
            points += act(chosen)
        return points

    def read(self) -> Field:
        """Look into the console's memory."""
        ram = self.emulator.getRAM()
        return Field(
            int(ram[BALL_X]),
            int(ram[BALL_Y]),
            -_signed(ram[ACROSS]),
            _signed(ram[ALONG]),
            int(ram[PADDLE_Y]),
        )

    def turned(self) -> float:
        """How far our paddle's knob is turned down from where it was at first.

        The unit is what pressing turns it in an emulated frame, until it is at a stop.
        The paddle follows with a delay.
        """
        state = self.emulator.cloneState().serialize()
        knob = int.from_bytes(state[KNOB], "little", signed=True)
        return (knob - STARTS_AT) / A_FRAME

    def save(self) -> Any:
        """The state, to be loaded into this or another console.

        All of it, but for what sticky actions draw next.
        """
        return self.emulator.cloneState()

    def load(self, state: Any) -> None:
        """Go on where ``state`` was saved."""
        self.emulator.restoreState(state)


def make_emulator(sticky: float = 0.0) -> Any:
    """An emulator with Pong in it, one frame an action.

    Args:
        sticky: probability that it repeats the action before.

    Raises:
        ModuleNotFoundError: ale-py, of the extra ``atari``, is not installed.
    """
    from ale_py import ALEInterface, LoggerMode

    ALEInterface.setLoggerMode(LoggerMode.Error)
    made = ALEInterface()
    made.setFloat("repeat_action_probability", sticky)
    insert(made, seed=0)  # or it would be the time
    return made


def insert(emulator: Any, seed: int) -> None:
    """Build the console anew; an emulator is seeded in no other way."""
    from ale_py import roms

    rom = roms.get_rom_path("pong")
    assert rom is not None
    emulator.setInt("random_seed", seed)
    emulator.loadROM(rom)


def _signed(byte: int) -> int:
    return (int(byte) + 128) % 256 - 128
