"""Games of Pong in ale-py's native vector env, each started by number."""

from typing import Any, NamedTuple

import numpy as np

SCREEN = 84
"""Height and width of a frame in pixels."""
NOOP = 0
"""The native action that does nothing."""
NEVER = 2**31 - 1
"""Emulated frames after which the native env would truncate."""
UNKNOWN = -1


class Played(NamedTuple):
    """What a step of all games returns."""

    frames: np.ndarray
    """``(games, 1, 84, 84)`` uint8; the caller's own."""
    rewards: np.ndarray
    """``(games,)`` points won less points lost."""
    over: np.ndarray
    """``(games,)`` bool: one side has 21 points."""


class Simulator:
    """Games that step together and start from a (seed, number) of one's choice.

    The native env draws how many no-ops a game begins with from a generator of each
    game. To seed it takes some twenty times as long as to start a game, since the
    console is built anew, and so a seed serves for several starts: start ``number`` is
    the game's start after ``number`` others from the same seed. Without sticky actions
    it does not depend on how those were played.

    Args:
        num_games: how many.
        frame_skip: emulated frames that an action lasts.
        noop_max: most no-ops at a start.
        sticky_actions: probability that a frame repeats the action before.
        threads: that emulate; 0 for one a core.
    """

    def __init__(
        self,
        num_games: int,
        *,
        frame_skip: int,
        noop_max: int,
        sticky_actions: float,
        threads: int,
    ) -> None:
        self.num_games = num_games
        self.turn = 0
        """Counts the calls that moved a game."""
        self.noops = np.zeros(num_games, np.int64)
        """How many no-ops each game began with."""
        self._native = vector_env()(
            "pong",
            num_games,
            num_threads=threads,
            max_num_frames_per_episode=NEVER,
            repeat_action_probability=sticky_actions,
            # It resets a game that is over only if that game is stepped once more.
            autoreset_mode="NextStep",
            img_height=SCREEN,
            img_width=SCREEN,
            # Stacks are the world's own: these would begin with black frames.
            stack_num=1,
            frameskip=frame_skip,
            # The native env stops one short of its maximum.
            noop_max=noop_max + 1,
            reward_clipping=False,
            use_fire_reset=False,
        )
        # Single games can be reset only after all were.
        self._native.reset()
        self._seeds = np.full(num_games, UNKNOWN)
        self._starts = np.zeros(num_games, np.int64)
        self._over = np.zeros(num_games, bool)

    def begin(
        self, games: np.ndarray, seeds: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """Start some games; the others stay where they are.

        Args:
            games: ``(n,)`` which ones, at least one.
            seeds: ``(n,)`` in ``[1, 2^31)``.
            numbers: ``(n,)`` of the starts from their seeds, at least 0.

        Returns:
            ``(games, 1, 84, 84)`` uint8, what all games show.
        """
        self.turn += 1
        wanted = np.full(self.num_games, UNKNOWN)
        wanted[games] = numbers
        passed = np.zeros(self.num_games, bool)
        passed[games] = (self._seeds[games] != seeds) | (self._starts[games] > numbers)
        self._seeds[games] = seeds
        if passed.any():
            frames = self._reset(passed, self._seeds[passed])
        self._starts[passed] = 1
        while (behind := self._starts <= wanted).any():
            frames = self._reset(behind)
            self._starts[behind] += 1
        self._over[games] = False
        return frames

    def step(self, actions: np.ndarray) -> Played:
        """Move every game; one that is over begins a game that counts for nothing.

        Args:
            actions: ``(games,)`` int64, of Pong's six.
        """
        self.turn += 1
        self._seeds[self._over] = UNKNOWN  # the native env draws a start of its own
        frames, rewards, self._over, _, _ = self._native.step(actions)
        return Played(frames, rewards, self._over)

    def _reset(self, games: np.ndarray, seeds: np.ndarray | None = None) -> np.ndarray:
        chosen = {"reset_mask": games}
        frames: np.ndarray
        frames, infos = self._native.reset(seed=seeds, options=chosen)
        self.noops[games] = infos["episode_frame_number"][games]
        return frames


def vector_env() -> Any:
    """Import the native vector env.

    Raises:
        ModuleNotFoundError: ale-py, of the extra ``atari``, is not installed.
    """
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv
