"""A scripted teacher for Pong: what a player that can look ahead would do."""

import torch
from torch import Tensor

from marl_pool.envs.pong import Pong
from marl_pool.envs.pong_player import Player, Start
from marl_pool.envs.pong_simulator import UNKNOWN
from marl_pool.errors import InputError


class PongPlanner:
    r"""Say what to do in the states where a `Pong` world's games are.

    It wins 21 : 0 from each of the 31 starts. It is no policy, since it does not look
    at the screen: a second console for each game, led through the same actions, shows
    it the ball in its memory and can be saved. That needs games without sticky actions,
    which follow from their no-ops and actions alone.

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
    played, it plays its plan ahead again, and looks for a new one if the outcome is
    worse. What it says depends on the world's seed, the number of world and episode
    and the actions since the episode began, not on when it was asked.

    ``world`` may be set to another one with the same options, such as that of the
    worlds still running (`Pong.take`); those that it knows by their numbers, it follows
    from where they were.

    Args:
        world: whose games it follows.

    Raises:
        InputError: the world has sticky actions.
    """

    def __init__(self, world: Pong) -> None:
        if world.sticky_actions:
            raise InputError(
                "env.sticky_actions: expected 0 for the planner, which cannot follow "
                f"games that differ by chance, got {world.sticky_actions}"
            )
        self.world = world
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
        self._players = {
            n: self._players.get(n) or Player(world.frame_skip) for n in numbers
        }
        starts = zip(
            numbers, world.episodes.tolist(), world.noops.tolist(), strict=True
        )
        history, steps = world.history.cpu().numpy(), world.steps.tolist()
        natives = [
            self._follow(Start(world.seed, *start), row[:count].tobytes())
            for start, row, count in zip(starts, history, steps, strict=True)
        ]
        known = world.native_actions.tolist()
        chosen = [[known.index(native)] for native in natives]
        return torch.tensor(chosen, device=world.device)

    def _follow(self, start: Start, actions: bytes) -> int:
        """Lead a player to where its game is; return its native action there."""
        player = self._players[start.world]
        if player.start != start or not actions.startswith(player.played):
            player.begin(start)
        for action in actions[len(player.played) :]:
            player.step(action)
        return player.action
