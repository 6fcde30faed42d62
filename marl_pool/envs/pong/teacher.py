"""A scripted teacher for Pong that reads the console's memory."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.pong.controller import GameStart, ValueController
from marl_pool.envs.pong.emulator import UNKNOWN
from marl_pool.envs.pong.env import Pong
from marl_pool.envs.pong.features import TARGET_NAMES, privileged_targets
from marl_pool.envs.pong.value_tables import DIRECTIONS
from marl_pool.utils.errors import InputError

SPARE = 32
"""Number of controllers kept for environments other than those asked about last."""


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
    student visits (DAgger: Ross, Gordon and Bagnell, 2011,
    https://arxiv.org/abs/1011.0686). Its answers depend on the game and its actions
    only, not on when it was asked.
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
        numbers = env.env_ids.tolist()
        asked = {number: self._controller(number, env) for number in numbers}
        # Keep some others: training and validation environments ask in turn.
        others = {k: v for k, v in self._controllers.items() if k not in asked}
        self._controllers = {**dict(list(others.items())[-SPARE:]), **asked}
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

    def _controller(self, number: int, env: Pong) -> ValueController:
        """Return the controller of an environment's number, or a new one."""
        options = env.frame_skip, env.sticky_actions
        known = self._controllers.get(number)
        if known is not None and known.options == options:
            return known
        return ValueController(*options)
