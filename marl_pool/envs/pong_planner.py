"""A scripted teacher for Pong: what a player that can look ahead would do."""

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.pong import Pong
from marl_pool.envs.pong_hints import HINTS, hints
from marl_pool.envs.pong_player import PUSHES, Player, Start
from marl_pool.envs.pong_simulator import UNKNOWN
from marl_pool.envs.pong_striker import Striker
from marl_pool.errors import InputError

SPARE = 32
"""Players that are kept of games other than those it was asked about last."""


class PongPlanner:
    r"""Say what to do in the states where a `Pong` world's games are.

    Without sticky actions it wins 21 : 0 from each of the 31 starts; where a quarter of
    the frames repeat the action before, it loses about one point in eleven. It is no
    policy, since it does not look at the screen: a second console for each game, led
    through the same actions with the same seed, shows it the ball in its memory and can
    be saved. A third one, whose actions never stick, is what it plays ahead on: it does
    not know which actions will stick.

    While the ball moves away or is not there, the paddle goes to where it waits. A ball
    at column x and row y that moves by (u, v) pixels a frame will cross the paddle's
    column h at the row

    .. math:: y + (h - x)\, v / u

    reflected at the walls; there the paddle goes, but for an offset. It has inertia,
    which is known: the paddle is pressed only if the place where it will come to rest
    is more than half a push away, and so some 95 of 100 actions are no-ops.

    How to meet the ball is found out when it turns towards the paddle, by playing on
    until a point is made or the ball comes back: with each of 13 offsets, and if none
    wins, with each of them and the last push made only 4, 8 or 12 emulated frames
    before the ball arrives. It is the first way that wins, or else a random one that
    does not lose.

    The actions played may be its own or anybody's, so that it can label the states that
    a student comes to (Ross, Gordon and Bagnell, 2011). If another one than its own was
    played, or an action stuck, it plays its plan ahead again, and looks for a new one
    if the outcome is worse. What it says depends on the world's seed, the number of
    world and episode and the actions since the episode began, not on when it was asked.

    ``world`` may be set to another one, such as that of the worlds still running
    (`Pong.take`); those that it knows by their numbers and that differ in no option, it
    follows from where they were.

    What wins can hardly be seen on the screen. With a fixed ``offset`` it does not look
    ahead, and what it does follows from what is seen: a weaker player, and a teacher
    that is easier to learn from.

    With ``striker`` it does not look ahead either, but knows what each press is worth
    (`marl_pool.envs.pong_striker`): made for sticky actions, where it is as strong as
    the planner, and easier to learn from, since all that it goes by can be seen, and
    `worth` says where much depends on the choice and where little.

    Args:
        world: whose games it follows.
        offset: of the paddle below the ball, always the same one, in pixels of
            210 × 160; -6 is its middle. None: look ahead.
        striker: go by what presses are worth; then ``offset`` means nothing.
    """

    hint_names = HINTS

    def __init__(
        self, world: Pong, *, offset: int | None = None, striker: bool = False
    ) -> None:
        self.world, self.offset, self.striker = world, offset, striker
        self._players: dict[int, Player] = {}

    def actions(self) -> Tensor:
        """What to do now, ``(num_envs, 1)`` int64 in the world's own actions.

        It is the no-op where the game is over.

        Raises:
            InputError: the world was never reset.
        """
        world = self.world
        if bool((world.noops == UNKNOWN).any()):
            raise InputError("planner: expected a world whose games have begun")
        numbers = world.worlds.tolist()
        asked = {number: self._player(number) for number in numbers}
        others = {k: v for k, v in self._players.items() if k not in asked}
        # Of two worlds in turn each finds its players where they were.
        spare = dict(list(others.items())[-SPARE:])
        self._players = {**spare, **asked}
        known = (world.episodes, world.noops, world.game_seeds)
        starts = zip(numbers, *(what.tolist() for what in known), strict=True)
        history, steps = world.history.cpu().numpy(), world.steps.tolist()
        natives = [
            self._follow(Start(world.seed, *start), row[:count].tobytes())
            for start, row, count in zip(starts, history, steps, strict=True)
        ]
        order = world.native_actions.tolist()
        chosen = [[order.index(native)] for native in natives]
        return torch.tensor(chosen, device=world.device)

    def worth(self) -> Tensor:
        """What a striker's actions are worth in points, ``(num_envs, 1, n)``.

        It is what `actions` has found last; 0 where the game is over.
        """
        order = self.world.native_actions.tolist()
        rows = []
        for number in self.world.worlds.tolist():
            player = self._players[number]
            assert isinstance(player, Striker)
            rows.append([[player.worth[PUSHES[native]] for native in order]])
        return torch.tensor(rows, dtype=torch.float32, device=self.world.device)

    def hints(self) -> Tensor:
        """What it knows of the games, ``(num_envs, 1, K)``, named in ``hint_names``.

        It is of the states that `actions` was asked about last; see `hints`.
        """
        worlds = self.world.worlds.tolist()
        known = np.stack([hints(self._players[number].moment) for number in worlds])
        return torch.from_numpy(known)[:, None].to(self.world.device)

    def _player(self, number: int) -> Player:
        """The player that follows a world of this number, or a new one."""
        options = self.world.frame_skip, self.world.sticky_actions, self.offset
        player = self._players.get(number)
        if player is not None and player.options == options:
            return player
        return Striker(*options[:2]) if self.striker else Player(*options)

    def _follow(self, start: Start, actions: bytes) -> int:
        """Lead a player to where its game is; return its native action there."""
        player = self._players[start.world]
        if player.start != start or not actions.startswith(player.played):
            player.begin(start)
        for action in actions[len(player.played) :]:
            player.step(action)
        return player.action
