"""Batched games of Pong in ale-py's native vector environment."""

import numpy as np

SCREEN = 84
"""Height and width of a frame in pixels."""
NOOP = 0
"""The native action that does nothing."""
NEVER = 2**31 - 1
"""Truncation limit of the native environment, in emulated frames."""
UNKNOWN = -1
"""Seed or number of no-ops of a game before its first start."""


class BatchedEmulator:
    """Games that are stepped together and start from any (seed, start number).

    The native environment samples the number of no-ops at a start from a generator of
    each game. Seeding it takes some twenty times as long as a start, since it rebuilds
    the console, so one seed is used for several starts: start number n is the start
    after n others from the same seed. Without sticky actions, it does not depend on how
    the games before it were played. The arguments are options of `Pong`.
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
        """Number of calls that changed a game."""
        self.noops = np.zeros(num_games, np.int64)
        """Number of no-ops at the start of each game."""
        from ale_py.vector_env import AtariVectorEnv

        self._native = AtariVectorEnv(
            "pong",
            num_games,
            num_threads=threads,
            max_num_frames_per_episode=NEVER,
            repeat_action_probability=sticky_actions,
            # A finished game is reset by the native environment at its next step.
            autoreset_mode="NextStep",
            img_height=SCREEN,
            img_width=SCREEN,
            # `Pong` stacks frames itself: native stacks begin with black frames.
            stack_num=1,
            frameskip=frame_skip,
            # The native maximum is exclusive.
            noop_max=noop_max + 1,
            reward_clipping=False,
            use_fire_reset=False,
        )
        # Single games can be reset only after a reset of all.
        self._native.reset()
        self._seeds = np.full(num_games, UNKNOWN)
        self._starts = np.zeros(num_games, np.int64)
        self._over = np.zeros(num_games, bool)

    def begin(
        self, games: np.ndarray, seeds: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        """Start some games; the others keep their states.

        Args:
            games: ``(n,)`` indices, at least one.
            seeds: ``(n,)`` in ``[1, 2^31)``.
            numbers: ``(n,)`` start numbers for these seeds, at least 0.

        Returns:
            Frames ``(games, 1, 84, 84)`` uint8 of all games.
        """
        # Count the call, and note the start that each game has to reach.
        self.turn += 1
        targets = np.full(self.num_games, UNKNOWN)
        targets[games] = numbers
        # Reseed games with another seed, or past the wanted start.
        passed = np.zeros(self.num_games, bool)
        passed[games] = (self._seeds[games] != seeds) | (self._starts[games] > numbers)
        self._seeds[games] = seeds
        if passed.any():
            frames = self._reset(passed, self._seeds[passed])
        self._starts[passed] = 1
        # Restart until each game has reached its start number.
        while (behind := self._starts <= targets).any():
            frames = self._reset(behind)
            self._starts[behind] += 1
        self._over[games] = False
        return frames

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step every game by one of Pong's six actions.

        A finished one starts another game, which `begin` discards.

        Returns:
            Frames ``(games, 1, 84, 84)`` uint8, owned by the caller; ``(games,)``
            points won less points lost; ``(games,)`` bool, True once a side has 21.
        """
        self.turn += 1
        self._seeds[self._over] = UNKNOWN  # they start from an unknown number
        frames, rewards, self._over, _, _ = self._native.step(actions)
        return frames, rewards, self._over

    def _reset(self, games: np.ndarray, seeds: np.ndarray | None = None) -> np.ndarray:
        options = {"reset_mask": games}
        frames: np.ndarray
        frames, infos = self._native.reset(seed=seeds, options=options)
        self.noops[games] = infos["episode_frame_number"][games]
        return frames
