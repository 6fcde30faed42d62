"""Atari Pong as a set of screen patches without positions."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, Unpack

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, BatchedEnv, EnvOptions
from marl_pool.envs.patches import PatchGrid, draw, patch_spec, patch_tokens
from marl_pool.envs.pong.emulator import NOOP, SCREEN, UNKNOWN, BatchedEmulator
from marl_pool.options.types import (
    Episodes,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Repeats,
    RepeatsOrZero,
    Size,
)
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

NATIVE_ACTIONS = {"minimal": (0, 1, 2, 3, 4, 5), "moves": (0, 2, 3)}
"""Native actions by option: no-op, fire, up, down, up and fire, down and fire."""
EPISODES_PER_SEED = 16
"""Episodes of one emulator seed without sticky actions, since seeding is slow."""
SEEDS = 2**31 - 2
"""Number of seeds of the emulator, counted from 1."""
STALE = -1
"""Turn of an environment whose games are not in the emulator."""


class Pong(BatchedEnv):
    """Play Atari Pong against the console from a set of screen patches.

    A frame is the maximum of an action's last two emulated frames, in grey, resized
    from 210 × 160 to 84 × 84 pixels. The last ``num_frames`` frames are cut into
    patches of 6 × 6 pixels: 196 tokens of 4 × 36 = 144 bytes. A token's features are
    frame-major: the 36 pixels of the oldest frame, row by row, then the next
    frame; the newest comes last. Tokens are ordered by rows from the upper left. After
    a reset the first frame is repeated in place of earlier ones.

    All tokens have the same type, none represents the agent, and none contains its
    position on the screen, so a permutation-invariant policy without a memory cannot
    locate the ball. Their order is fixed: permutations (``perturbation=shuffle``;
    within an episode, as in the paper's test, ``perturbation.scope=frame``) and missing
    patches (``occlude``) are perturbations. The features are bytes; the embedding
    divides them by 255.

    The reward is 1 for a point won and -1 for a point lost; the game ends (terminated)
    at 21 points. 27 000 steps of four frames are the usual limit of 108 000 frames.
    After the end of a game its screen and reward stay constant until the next reset.

    Without sticky actions the only random number of an episode is the number of no-ops
    before its first observation, uniform in 0, …, ``noop_max``. The game then depends
    on the actions only, so a policy can memorise the 31 starts. With
    ``sticky_actions`` episodes differ, and a reset takes some twenty times as long,
    since seeding rebuilds the emulator.

    The vectorised emulator cannot save games. The environment records the actions of
    its episodes, and replays them after a state was loaded, or when both an environment
    and one made from it by `select` are stepped. Games that `select` leaves out
    continue with no-ops.

    Source: PuzzlePong in section 4.3 of `Tang and Ha, 2021
    <https://arxiv.org/abs/2109.02869>`_, on the `Arcade Learning Environment
    <https://arxiv.org/abs/1207.4708>`_ through ale-py. As in the published code there
    are six actions and no sticky ones, the 10 rows with the score are black, and the
    first frame is repeated. Frames and rewards are as in Gymnasium's
    ``AtariPreprocessing`` of ``PongNoFrameskip-v4``, whose no-ops are 1 to 30.

    Args:
        frame_skip: emulated frames per action.
        num_frames: frames in a token.
        patch: height and width of a patch in pixels, a divisor of 84.
        noop_max: largest number of no-ops before the first observation.
        sticky_actions: probability that an emulated frame repeats the previous action;
            the usual values are 0 and 0.25.
        zero_rows: rows of pixels at the top that are made black; the first 10 contain
            the score.
        actions: ``"minimal"`` for Pong's six (no-op, fire, up, down, up and fire, down
            and fire), ``"moves"`` for no-op, up and down, which suffice.
        threads: CPU threads of the emulator; 0 for one per core. Use 1 where other
            processes occupy the cores.

    Raises:
        InputError: a patch that does not divide the screen.
        ModuleNotFoundError: ale-py, of the extra ``atari``, is not installed.
    """

    simulated = True
    shows_state = has_token_order = True
    state_names = ("screens", "over", "action_log", "noops")
    patch_grid: PatchGrid
    screens: Tensor
    """``(num_envs, num_frames, 84, 84)`` uint8, the newest frame last."""
    over: Tensor
    """``(num_envs,)`` bool: the game has ended."""
    action_log: Tensor
    """``(num_envs, at least steps)`` uint8: native actions of the current episodes."""
    noops: Tensor
    """``(num_envs,)`` int64: number of no-ops before the first observation."""

    def __init__(
        self,
        num_envs: Episodes,
        *,
        frame_skip: PositiveInt = 4,
        num_frames: Repeats = 4,
        patch: Size = 6,
        noop_max: NonNegativeInt = 30,
        sticky_actions: Probability = 0.0,
        zero_rows: Annotated[int, Field(ge=0, le=SCREEN)] = 10,
        actions: Literal["minimal", "moves"] = "minimal",
        threads: RepeatsOrZero = 0,
        max_steps: Episodes = 27_000,
        **common: Unpack[EnvOptions],
    ) -> None:
        if SCREEN % patch:
            raise InputError(f"env.patch: expected a divisor of {SCREEN}, got {patch}")
        import ale_py.vector_env  # noqa: F401  fail here if it is missing

        super().__init__(num_envs, max_steps=max_steps, **common)
        self.num_frames, self.zero_rows = num_frames, zero_rows
        # The emulator is built at the first reset.
        self._new_emulator = partial(
            BatchedEmulator,
            frame_skip=frame_skip,
            noop_max=noop_max,
            sticky_actions=sticky_actions,
            threads=threads,
        )
        self.patch_grid = PatchGrid(SCREEN, patch, patch)
        # Without sticky actions, a seed gives several games with different no-ops.
        self._starts_per_seed = 1 if sticky_actions else EPISODES_PER_SEED
        self.frame_skip, self.sticky_actions = frame_skip, sticky_actions
        self.native_actions = torch.tensor(NATIVE_ACTIONS[actions], device=self.device)
        space: spaces.Discrete = spaces.Discrete(len(self.native_actions))
        spec = patch_spec(self.patch_grid, num_frames, colors=1)
        self.groups = {"agent": AgentGroup(1, spec, space)}
        self._emulator: BatchedEmulator | None = None
        self._games = np.arange(num_envs)  # indices into the emulator's games
        self._turn = STALE
        shape = (num_envs, num_frames, SCREEN, SCREEN)
        self.screens = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.action_log = self.screens.new_zeros(num_envs, 0)
        self.noops = torch.full_like(self.env_ids, UNKNOWN)

    @property
    def game_seeds(self) -> Tensor:
        """Seeds ``(num_envs,)`` int64 of the emulator, by episode."""
        # Consecutive episodes share a seed, since seeding is slow.
        blocks = self.episodes // self._starts_per_seed
        keys = stream_keys(self.seed, self.env_ids, blocks, Purpose.RESET)
        return (uniform(keys, 1)[:, 0] * SEEDS).long() + 1

    @override
    def observe(self) -> dict[str, Tokens]:
        return {"agent": patch_tokens(self.screens[..., None], self.patch_grid)}

    @override
    def select(self, indices: Tensor) -> Self:
        # The first of the two to be stepped continues at once, because its turn is the
        # emulator's; the other one replays its games first.
        selected = super().select(indices)
        selected._games = self._games[indices.cpu().numpy()]
        if len(np.unique(selected._games)) < len(selected._games):
            selected._turn = STALE  # a game cannot be continued in two ways
        return selected

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_emulator": None, "_turn": STALE}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        saved, self._turn = self.screens, STALE
        if not saved.any():  # saved before the first reset
            return
        if self._emulator is None or self._emulator.num_games != self.num_envs:
            self._build()
        self._replay()
        if not torch.equal(saved, self.screens):
            raise InputError(
                "env pong: expected the screens of the saved state after a replay, got "
                "different ones: use the version of ale-py that saved it"
            )

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        screen = self.screens[index, -1].cpu().numpy()
        return draw(screen, weights, self.patch_grid, size)

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        if len(rows) < self.num_envs:
            self._catch_up()
        elif self._turn == STALE:
            self._build()
        self._begin(rows)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        # Log the native actions, from which the games can be replayed.
        self._catch_up()
        native = self.native_actions[actions["agent"][:, 0]]
        if int(self.steps.max()) >= self.action_log.shape[1]:
            # Double the log, so that steps rarely allocate.
            extra = max(1024, self.action_log.shape[1])
            longer = self.action_log.new_zeros(self.num_envs, extra)
            self.action_log = torch.cat([self.action_log, longer], 1)
        self.action_log.scatter_(1, self.steps[:, None], native[:, None].byte())
        rewards = self._step_games(native)
        return {"agent": rewards[:, None]}, self.over

    def _build(self) -> None:
        """Create an emulator that no other environment uses."""
        self._emulator = self._new_emulator(self.num_envs)
        self._games = np.arange(self.num_envs)

    def _catch_up(self) -> None:
        """Bring the emulator's games to the states of this environment."""
        if self._emulator is None or self._emulator.turn != self._turn:
            self._build()
            self._replay()

    def _replay(self) -> None:
        """Replay the episodes up to their current steps."""
        # The games cannot pause. So that all of them end at the same time, each starts
        # when as many steps remain as it has played.
        self.over = torch.zeros_like(self.over)
        total = int(self.steps.max())
        for missing in range(total, -1, -1):
            self._begin((self.steps == missing).nonzero()[:, 0])
            if missing:
                times = (self.steps - missing).clamp(min=0)
                self._step_games(self.action_log.gather(1, times[:, None])[:, 0].long())

    def _begin(self, rows: Tensor) -> None:
        """Start the current episodes of ``rows``."""
        if not len(rows):
            return
        emulator = self._emulator
        assert emulator is not None
        # Start the games by the seed and number of their episodes.
        starts = (self.game_seeds, self.episodes % self._starts_per_seed)
        seeds, numbers = (part[rows].cpu().numpy() for part in starts)
        frames = emulator.begin(self._games[rows.cpu().numpy()], seeds, numbers)
        self._turn = emulator.turn
        # Mark the games as running, and note how many no-ops they began with.
        first = torch.zeros_like(self.over)
        first[rows] = True
        self.over = self.over & ~first
        noops = torch.from_numpy(emulator.noops[self._games]).to(self.device)
        self.noops = torch.where(first, noops, self.noops)
        self._push_frames(frames, first, first=True)

    def _step_games(self, actions: Tensor) -> Tensor:
        """Step the games by native actions ``(num_envs,)``; return the rewards."""
        emulator = self._emulator
        assert emulator is not None
        # Games of other environments are stepped too; they get no-ops.
        moves = np.full(emulator.num_games, NOOP)
        moves[self._games] = actions.cpu().numpy()
        frames, points, ended = emulator.step(moves)
        self._turn = emulator.turn
        # A finished game keeps its screen, and its points no longer count.
        running = ~self.over
        self._push_frames(frames, running, first=False)
        self.over = self.over | torch.from_numpy(ended[self._games]).to(self.device)
        rewards = torch.from_numpy(points[self._games]).to(self.device)
        return rewards.to(self.dtype).mul_(running)

    def _push_frames(self, frames: np.ndarray, where: Tensor, first: bool) -> None:
        """Push frames ``(games, 1, 84, 84)`` onto the stacks in ``where``.

        The first frames of an episode fill the stack.
        """
        if not np.array_equal(self._games, np.arange(len(frames))):
            frames = frames[self._games]
        newest = torch.from_numpy(frames)
        newest[:, :, : self.zero_rows] = 0
        newest = newest.to(self.device)
        if first:
            screens = newest.repeat(1, self.num_frames, 1, 1)
        else:
            screens = torch.cat([self.screens[:, 1:], newest], 1)
        if not where.all():
            screens = torch.where(where[:, None, None, None], screens, self.screens)
        self.screens = screens
