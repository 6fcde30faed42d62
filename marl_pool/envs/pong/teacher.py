"""A scripted teacher for Pong that reads the console's memory."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.pong.console import (
    PUSH,
    TARGET_NAMES,
    Console,
    approaches,
    privileged_targets,
)
from marl_pool.envs.pong.emulator import NOOP, UNKNOWN
from marl_pool.envs.pong.env import Pong
from marl_pool.envs.pong.value_tables import DIRECTIONS, DOWN, SIGNS, UP, action_values
from marl_pool.utils.errors import InputError

MOVES = (NOOP, DOWN, UP)
"""Native actions of the controller, in the order of `SIGNS`."""
WAITING_ROW = 118
"""Resting place of the paddle while no ball approaches."""
WAITING_SCALE = 500.0
"""Pixels from the waiting row that cost one point while no ball approaches."""
SPARE = 32
"""Number of controllers kept for environments other than those asked about last."""


class GameStart(NamedTuple):
    """Arguments of `Console.begin`, which with the actions decide a game."""

    noops: int
    seed: int


class ValueController:
    """Mirror a game on a second console, and choose the action of highest value.

    An approaching ball that leaves the paddle at two rows a frame wins from some rows;
    no other return does. `action_values` estimates the probability that an action
    leads to such a return, or to a miss. While no ball approaches, the paddle goes to
    `WAITING_ROW`. Everything that the choice depends on is visible on the screen.
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
        """Go to the state after native actions, from the present one if possible."""
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


class ValueTableAnswer(NamedTuple):
    """Answers of `ValueTableTeacher`, a row for each environment."""

    actions: Tensor
    """``(num_envs, 1)`` int64 actions of the environment; no-ops after the end."""
    values: Tensor
    """``(num_envs, 1, n)`` values of its actions in points; 0 after the end."""
    targets: Tensor
    """``(num_envs, 1, K)`` privileged targets, see `privileged_targets`."""


class ValueTableTeacher:
    """Label the states of `Pong` environments with actions and their values.

    It is no policy, since it does not look at the screen. A second console for each
    game, led through the same actions with the same seed, shows it the ball and the
    paddle, and a table has the value of each action there: `ValueController`.

    The executed actions may be anybody's, so that it can label the states that a
    student visits (`DAgger <https://arxiv.org/abs/1011.0686>`_). Its answers depend on
    the game and its actions only, not on when it was asked.
    """

    target_names = TARGET_NAMES

    def __init__(self) -> None:
        self._controllers: dict[int, ValueController] = {}

    def answer(self, env: Pong) -> ValueTableAnswer:
        """Label the present states.

        Raises:
            InputError: the environment was never reset.
        """
        if bool((env.noops == UNKNOWN).any()):
            raise InputError("pong: expected games that have begun, got none: reset it")
        # Find the controller of each game, or make one.
        numbers, options = env.env_ids.tolist(), (env.frame_skip, env.sticky_actions)
        asked = {}
        for number in numbers:
            known = self._controllers.get(number)
            fits = known is not None and known.options == options
            asked[number] = known if fits else ValueController(*options)
        # Keep some others: training and validation environments ask in turn.
        others = {k: v for k, v in self._controllers.items() if k not in asked}
        self._controllers = {**dict(list(others.items())[-SPARE:]), **asked}
        # Lead each controller through its game's actions, then ask it.
        logs, steps = env.action_log.cpu().numpy(), env.steps.tolist()
        starts = zip(env.noops.tolist(), env.game_seeds.tolist(), strict=True)
        order = env.native_actions.tolist()
        actions, values, targets = [], [], []
        for number, start, row, count in zip(numbers, starts, logs, steps, strict=True):
            controller = asked[number]
            controller.follow(GameStart(*start), row[:count].tobytes())
            actions.append([order.index(controller.action)])
            values.append([[controller.values[DIRECTIONS[native]] for native in order]])
            targets.append(privileged_targets(controller.state))
        return ValueTableAnswer(
            torch.tensor(actions, device=env.device),
            torch.tensor(values, dtype=torch.float32, device=env.device),
            torch.from_numpy(np.stack(targets))[:, None].to(env.device),
        )
