"""A controller of one game of Pong that chooses actions by their values."""

from typing import NamedTuple

import numpy as np

from marl_pool.envs.pong.console import PUSH, Console
from marl_pool.envs.pong.emulator import NOOP
from marl_pool.envs.pong.features import approaches
from marl_pool.envs.pong.value_tables import DOWN, SIGNS, UP, action_values

MOVES = (NOOP, DOWN, UP)
"""Native actions of the controller, in the order of `SIGNS`."""
WAITING_ROW = 118
"""Resting place of the paddle while no ball approaches."""
WAITING_SCALE = 500.0
"""Pixels from the waiting row that cost one point while no ball approaches."""


class GameStart(NamedTuple):
    """The start of a game, which decides the game together with its actions."""

    noops: int
    seed: int
    """Of the emulator's random numbers, used by sticky actions only."""


class ValueController:
    """Mirror a game on a second console, and choose the action of highest value.

    An approaching ball that leaves the paddle at two rows a frame wins from some rows;
    no other return does. `action_values` estimates the probability that an action
    leads to such a return, or to a miss. While no ball approaches, the paddle goes to
    `WAITING_ROW`. Everything that the choice depends on is visible on the screen.

    Args:
        frame_skip: emulated frames of one action.
        sticky: probability that a frame repeats the previous action.
    """

    def __init__(self, frame_skip: int, sticky: float = 0.0) -> None:
        self.options = frame_skip, sticky
        self.console = Console(frame_skip, sticky)
        self.start: GameStart | None = None
        """The mirrored game; None before `begin`."""
        self.played = bytearray()
        """The native actions of the game so far."""
        self.action = NOOP
        """The native action that the controller chooses in the present state."""
        self.values = np.zeros(len(MOVES))
        """The value of each of `MOVES` in points; 0 after the end of the game."""

    def follow(self, start: GameStart, actions: bytes) -> None:
        """Go to a state of a game, onwards from the present one where possible.

        Args:
            start: of the game.
            actions: the native actions since then.
        """
        if self.start != start or not actions.startswith(self.played):
            self.begin(start)
        for action in actions[len(self.played) :]:
            self.step(action)

    def begin(self, start: GameStart) -> None:
        """Go to the start of a game."""
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
