"""Atari Pong as a set of patches that do not say where on the screen they are."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor

from marl_pool.envs.base import Group, World, WorldOptions
from marl_pool.envs.options import require
from marl_pool.envs.patch_drawing import PatchGrid, draw
from marl_pool.envs.pong_simulator import (
    NOOP,
    SCREEN,
    UNKNOWN,
    Simulator,
    vector_env,
)
from marl_pool.errors import InputError
from marl_pool.randomness import Purpose, stream_keys, uniform
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.types import NonNegativeInt, PositiveInt, Probability

NATIVE_ACTIONS = {"minimal": (0, 1, 2, 3, 4, 5), "moves": (0, 2, 3)}
"""Each choice's number among no-op, fire, up, down, up and fire, down and fire."""
EPISODES_PER_SEED = 16
"""Of the simulator, without sticky actions: seeding is slow, and rarely needed."""
SEEDS = 2**31 - 2
"""How many seeds the emulator takes, from 1 on."""
STALE = -1
"""The turn of a world whose games the simulator does not hold."""


class Pong(World):
    """Play Atari Pong against the console, seeing the screen as loose patches.

    A frame is the maximum of an action's last two emulated frames, in grey, resized
    from 210 × 160 to 84 × 84 pixels. The last ``num_frames`` of them are cut into
    patches of 6 × 6 pixels: 196 tokens of 4 × 36 = 144 bytes. A token's features are
    frame-major: the 36 pixels of the oldest frame, row by row, then those of the next
    one; the newest comes last. Tokens come in rows from the upper left. After a reset
    the first frame stands for those before it.

    All tokens are of one type, none is the agent itself, and none carries its place on
    the screen. So a policy that does not care for their order and has no memory cannot
    play: it cannot tell where the ball is. The order never changes here: a permutation
    (``perturbation=shuffle``) and missing patches (``occlude``) are perturbations.
    Orders that change within an episode are the paper's test with
    ``perturbation.scope=frame``. The features are bytes; the embedding divides them by
    255.

    The reward is 1 for a point won and -1 for a point lost; the game is over
    (terminated) at 21. An episode is truncated after ``max_steps``: 27 000 steps of
    four frames are the usual limit of 108 000 frames. A world whose game is over stands
    still until it is reset.

    Without sticky actions an episode's only random number is that of the no-ops before
    its first observation, uniform in 0, …, ``noop_max``: there are 31 starts, and what
    follows is the same for the same actions, so that a policy can learn it by heart.
    With ``sticky_actions`` every episode is another one, and a reset takes some twenty
    times as long, since the emulator is seeded by building it anew.

    The simulator cannot save games. A world keeps its episodes' actions, and plays them
    again when a state is loaded, or when a world made by `take` and the one that it was
    taken from both go on. Games that `take` leaves out run on idly.

    Source: PuzzlePong in Tang and Ha, The sensory neuron as a transformer (2021),
    section 4.3, on the Arcade Learning Environment (Bellemare et al., 2013) through
    ale-py; six actions, no sticky ones and the 10 rows with the score black are the
    published code's, and so is the first frame that stands for those before it. Frames
    and rewards are those of Gymnasium's ``AtariPreprocessing`` of
    ``PongNoFrameskip-v4``, whose no-ops are 1 to 30.

    Args:
        num_envs: games in the batch.
        frame_skip: emulated frames that an action lasts, at least 1.
        num_frames: frames of a token, at least 1.
        patch: height and width of a patch in pixels, a divisor of 84.
        noop_max: most no-ops before an episode's first observation, at least 0.
        sticky_actions: probability in [0, 1) that an emulated frame repeats the action
            before, whatever was chosen; 0.25 is the usual value other than 0.
        zero_rows: rows of pixels at the top that are black, 0 to 84. The 10 of the
            published code hold the score.
        actions: ``"minimal"`` for Pong's six (no-op, fire, up, down, up and fire, down
            and fire), ``"moves"`` for no-op, up and down, which suffice.
        threads: CPU threads that emulate; 0 for one a core. Take 1 where processes fill
            the cores.
        max_steps: steps until truncation.

    Raises:
        InputError: a number out of range, or an unknown choice.
        ModuleNotFoundError: ale-py, of the extra ``atari``, is not installed.
    """

    simulated = True

    screens: Tensor
    """``(num_envs, num_frames, 84, 84)`` uint8, the newest frame last."""
    over: Tensor
    """``(num_envs,)`` bool: the game has ended."""
    history: Tensor
    """``(num_envs, at least steps)`` uint8: native actions since the episode began."""
    noops: Tensor
    """``(num_envs,)`` int64: how many no-ops came before the episode's actions."""

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        frame_skip: PositiveInt = 4,
        num_frames: PositiveInt = 4,
        patch: PositiveInt = 6,
        noop_max: NonNegativeInt = 30,
        sticky_actions: Probability = 0.0,
        zero_rows: Annotated[int, Field(ge=0, le=SCREEN)] = 10,
        actions: Literal["minimal", "moves"] = "minimal",
        threads: NonNegativeInt = 0,
        max_steps: PositiveInt = 27_000,
        **common: Unpack[WorldOptions],
    ) -> None:
        divides = SCREEN % patch == 0
        require("patch", patch, divides, f"a divisor of {SCREEN}")
        vector_env()  # what is missing is to be missed now, not when a game begins
        super().__init__(
            num_envs,
            max_steps=max_steps,
            **common,
        )
        self.num_frames, self.patch, self.zero_rows = num_frames, patch, zero_rows
        self._options: dict[str, Any] = {
            "frame_skip": frame_skip,
            "noop_max": noop_max,
            "sticky_actions": sticky_actions,
            "threads": threads,
        }
        self.patch_grid = PatchGrid(SCREEN, patch, patch)
        self._starts_per_seed = 1 if sticky_actions else EPISODES_PER_SEED
        self.frame_skip, self.sticky_actions = frame_skip, sticky_actions
        self.native_actions = torch.tensor(NATIVE_ACTIONS[actions], device=self.device)
        self._groups = {"agent": self._describe()}
        self._simulator: Simulator | None = None
        self._games = np.arange(num_envs)  # this world's among the simulator's
        self._turn = STALE
        shape = (num_envs, num_frames, SCREEN, SCREEN)
        self.screens = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.over = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.history = torch.zeros(num_envs, 0, dtype=torch.uint8, device=self.device)
        self.noops = torch.full_like(self.worlds, UNKNOWN)

    @property
    def groups(self) -> dict[str, Group]:
        """One group, ``"agent"``, of one agent."""
        return self._groups

    @property
    def game_seeds(self) -> Tensor:
        """What the episodes' emulators are seeded with, ``(num_envs,)`` int64.

        With sticky actions every episode has a seed of its own.
        """
        blocks = self.episodes // self._starts_per_seed
        keys = stream_keys(self.seed, self.worlds, blocks, Purpose.RESET)
        return (uniform(keys, 1)[:, 0] * SEEDS).long() + 1

    def observe(self) -> dict[str, Tokens]:
        """Tokens ``(num_envs, 1, N)`` of bytes; see the class."""
        side, pixels = SCREEN // self.patch, self.patch
        shape = (self.num_envs, self.num_frames, side, pixels, side, pixels)
        patches = self.screens.view(shape).permute(0, 2, 4, 1, 3, 5)
        features = patches.reshape(self.num_envs, 1, side * side, -1)
        types = torch.zeros(features.shape[:3], dtype=torch.int64, device=self.device)
        return {"agent": Tokens(features, types, types.bool())}

    def take(self, indices: Tensor) -> "Pong":
        """Return a world of the rows ``indices``, where they stand now.

        One of the two can go on at once; the other one plays its games again first.
        """
        taken = super().take(indices)
        assert isinstance(taken, Pong)
        taken._games = self._games[indices.cpu().numpy()]
        if len(np.unique(taken._games)) < len(taken._games):
            taken._turn = STALE  # one game cannot be played in two ways
        return taken

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, by playing its games again.

        Raises:
            InputError: they went otherwise, under another version of ale-py, say.
        """
        super().load_state_dict(state)
        saved, self._turn = self.screens, STALE
        if not saved.any():  # no game had begun
            return
        simulator = self._simulator
        if simulator is None or simulator.num_games != self.num_envs:
            self._build()
        self._replay()
        if not torch.equal(saved, self.screens):
            raise InputError(
                "env pong: the saved games take another course here: expected the "
                "version of ale-py that played them"
            )

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw the newest frame of world ``index``; see `World.frame`.

        It is what the agent sees. Attention tints the patches.
        """
        screen = self.screens[index, -1].cpu().numpy()
        return draw(screen, attention, patch=self.patch, stride=self.patch, size=size)

    def _place(self, rows: Tensor, keys: Tensor) -> None:
        if len(rows) < self.num_envs:
            self._catch_up()
        elif self._turn == STALE:
            self._build()
        self._begin(rows)

    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        self._catch_up()
        chosen = self.native_actions[actions["agent"][:, 0]]
        if int(self.steps.max()) >= self.history.shape[1]:
            more = max(1024, self.history.shape[1])
            longer = self.history.new_zeros(self.num_envs, more)
            self.history = torch.cat([self.history, longer], 1)
        self.history.scatter_(1, self.steps[:, None], chosen[:, None].byte())
        rewards = self._play(chosen)
        return {"agent": rewards[:, None]}, self.over

    def _tensors(self) -> dict[str, Tensor]:
        names = ("screens", "over", "history", "noops")
        return {name: getattr(self, name) for name in names}

    def _describe(self) -> Group:
        tokens = (SCREEN // self.patch) ** 2
        features = self.num_frames * self.patch**2
        spec = TokenSpec(
            tokens,
            features,
            ("patch",),
            has_self=False,
            dtype="uint8",
            num_frames=self.num_frames,
        )
        return Group(1, spec, spaces.Discrete(len(self.native_actions)))

    def _build(self) -> None:
        """Get games that no other world plays, not yet begun."""
        self._simulator = Simulator(self.num_envs, **self._options)
        self._games = np.arange(self.num_envs)

    def _catch_up(self) -> None:
        """See that the simulator's games stand where this world's do."""
        if self._simulator is None or self._simulator.turn != self._turn:
            self._build()
            self._replay()

    def _replay(self) -> None:
        """Play the episodes again, up to where they stand."""
        # No game can wait, and all must arrive at once: the longest begins first.
        self.over = torch.zeros_like(self.over)
        total = int(self.steps.max())
        for time in range(total + 1):
            missing = total - time
            self._begin((self.steps == missing).nonzero()[:, 0])
            if missing:
                places = (self.steps - missing).clamp(min=0)
                self._play(self.history.gather(1, places[:, None])[:, 0].long())

    def _begin(self, rows: Tensor) -> None:
        """Begin the episodes that the worlds ``rows`` have come to."""
        if not len(rows):
            return
        simulator = self._simulator
        assert simulator is not None
        numbers = self.episodes[rows] % self._starts_per_seed
        seeds = self.game_seeds[rows]
        games = self._games[rows.cpu().numpy()]
        frames = simulator.begin(games, seeds.cpu().numpy(), numbers.cpu().numpy())
        self._turn = simulator.turn
        fresh = torch.zeros_like(self.over)
        fresh[rows] = True
        self.over = self.over & ~fresh
        noops = torch.from_numpy(simulator.noops[self._games]).to(self.device)
        self.noops = torch.where(fresh, noops, self.noops)
        self._show(frames, fresh, first=True)

    def _play(self, chosen: Tensor) -> Tensor:
        """Step the games by native actions ``(num_envs,)``; return the rewards."""
        simulator = self._simulator
        assert simulator is not None
        moves = np.full(simulator.num_games, NOOP)
        moves[self._games] = chosen.cpu().numpy()
        played = simulator.step(moves)
        self._turn = simulator.turn
        running = ~self.over
        self._show(played.frames, running, first=False)
        over = torch.from_numpy(played.over[self._games]).to(self.device)
        self.over = self.over | over
        rewards = torch.from_numpy(played.rewards[self._games]).to(self.device)
        return rewards.to(self.dtype).mul_(running)

    def _show(self, frames: np.ndarray, where: Tensor, first: bool) -> None:
        """Push the frames of the worlds ``where``; the others keep their stacks.

        Args:
            frames: ``(games, 1, 84, 84)`` of all the simulator's games.
            where: ``(num_envs,)`` bool.
            first: whether episodes begin with them.
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
