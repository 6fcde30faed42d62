"""A scripted player of one game of Pong, which plays ahead before each stroke."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from marl_pool.envs.pong_console import Console, Field
from marl_pool.envs.pong_simulator import NOOP
from marl_pool.randomness import Purpose, stream_keys, uniform

UP, DOWN = 2, 3
"""Native actions."""
PUSHES = (0, 0, -1, 1, -1, 1)
"""Which way each native action pushes the paddle; down is 1."""
PUSH = 5.73
"""How far an emulated frame pushes the place where the paddle will come to rest."""
FIRST_REST = 109.0
"""Where it rests when a game begins."""
RESTS = (14.0, 204.0)
"""Between them it is pushed. What is beyond 38 and 203 takes time, but shows not."""
HIT = 188
"""The column, in the console's units, where the ball meets our paddle."""
WALLS = (45.0, 206.5)
"""Rows, in the console's units, between which the ball is reflected."""
WAIT = 118
"""Where the paddle waits while no ball approaches."""
HORIZON = 360
"""Emulated frames that are played ahead at most."""
PART = 1 << 16
"""Of the random streams: none of a group of agents has this number."""


class Outcome(IntEnum):
    """What a stroke leads to, as seen from the moment before it."""

    LOST = -1
    SAFE = 0
    """The ball comes back, or nothing has happened when the horizon is reached."""
    WON = 1


class Aim(NamedTuple):
    """How to meet the ball."""

    offset: int
    """Of the paddle, below the ball."""
    held: int
    """Emulated frames before the ball arrives when the last push is made at most."""


OFFSETS = range(-18, 7, 2)
"""The ball hits all of the paddle from the first to the last."""
AIMS = (
    [Aim(offset, HORIZON) for offset in OFFSETS],
    [Aim(offset, held) for offset in OFFSETS for held in (4, 8, 12)],
)
"""What is tried, the second list if none of the first wins: to rest there, or to hit
the ball while the paddle moves."""
CENTRED = Aim(-6, HORIZON)
"""With the ball in the middle of the paddle: what is left if all lose."""


class Plan(NamedTuple):
    """An aim and what it leads to."""

    aim: Aim
    outcome: Outcome


class Moment(NamedTuple):
    """A state of the game, as far as decisions depend on it."""

    field: Field
    rest: float
    """Where the paddle comes to rest if it is left alone; it lags behind."""


class Branch(NamedTuple):
    """A future in which some aims have pressed alike so far."""

    aims: Sequence[Aim]
    console: Any
    moment: Moment
    step: int
    left: bool
    """Whether the ball has already left."""


class Start(NamedTuple):
    """What a game, but for its actions, and what the player draws depend on."""

    seed: int
    world: int
    episode: int
    noops: int
    game_seed: int = 0
    """Of the emulator, for sticky actions."""


class Player:
    """Mirrors a game on a console of its own, and says what to press in each state.

    Args:
        frame_skip: emulated frames that an action lasts.
        sticky: probability that a frame of the game repeats the action before. The
            player does not look ahead at when.
        offset: of the paddle below the ball, always the same one; None to look ahead
            for the one that wins.
    """

    def __init__(
        self, frame_skip: int, sticky: float = 0.0, offset: int | None = None
    ) -> None:
        self.options = frame_skip, sticky, offset
        self._steady = None if offset is None else Aim(offset, HORIZON)
        self.console = Console(frame_skip, sticky)
        self._ahead = Console(frame_skip)
        self._push = PUSH * frame_skip
        self.start: Start | None = None
        """The game; none before `begin`."""
        self.played = bytearray()
        """The native actions that it was led through."""
        self.action = NOOP
        """What the player does in the state where it stands, as a native action."""
        self._plan: Plan | None = None
        self._horizon = max(HORIZON // frame_skip, 1)

    def begin(self, start: Start) -> None:
        """Go to the start of a game."""
        self.start, self.played = start, bytearray()
        world, episode = torch.tensor([start.world]), torch.tensor([start.episode])
        self._key = stream_keys(start.seed, world, episode, Purpose.POLICY, PART)
        self._plan = None
        self.console.begin(start.noops, start.game_seed)
        self._now = self._see()
        self._decide(departed=False)

    def step(self, action: int) -> None:
        """Follow a native action, its own or another one; none moves a game over."""
        self.played.append(action)
        if self.console.over:
            return
        foreseen = self._rest_after(self._now, action)
        self.console.step(action)
        self._now = self._see()
        stuck = abs(self._now.rest - foreseen) > PUSH / 2
        self._decide(departed=stuck or action != self.action)

    @property
    def moment(self) -> Moment:
        """The state where the player stands."""
        return self._now

    def _see(self) -> Moment:
        """What the game has come to."""
        rest = FIRST_REST + PUSH * self.console.turned()
        return Moment(self.console.read(), rest)

    def _decide(self, departed: bool) -> None:
        if self.console.over:
            self.action = NOOP
            return
        plan = self._meet(departed) if approaches(self._now.field) else None
        self.action = self._press(self._now, None if plan is None else plan.aim)
        self._plan = plan

    def _meet(self, departed: bool) -> Plan:
        """The plan for the ball that approaches: the old one, if it holds."""
        if self._steady is not None:
            return Plan(self._steady, Outcome.SAFE)
        old = self._plan
        if old is None:
            return self._try(AIMS)
        if not departed:
            return old
        same = self._try([[old.aim]])
        return same if same.outcome >= old.outcome else self._try(AIMS)

    def _press(self, moment: Moment, aim: Aim | None) -> int:
        """The action that brings the paddle's rest next to its target."""
        # Half a push is the nearest that can be had; with less it would go to and fro.
        field, near = moment.field, self._push / 2 + 0.5
        target = float(WAIT)
        if aim is not None:
            target = crossing(field) + aim.offset
            if HIT - field.ball_x > aim.held * field.across:
                near += self._push
        way = target - moment.rest
        if abs(way) <= near:
            return NOOP
        return UP if way < 0 else DOWN

    def _rest_after(self, before: Moment, action: int) -> float:
        """Where the paddle will come to rest after an action that does not stick."""
        low, high = RESTS
        return min(max(before.rest + self._push * PUSHES[action], low), high)

    def _try(self, choices: Sequence[Sequence[Aim]]) -> Plan:
        """Play ahead: the first aim that wins, or else a random safe one.

        Args:
            choices: lists of aims; a list is tried if none of those before it wins.
        """
        here, safe = self.console.save(), list[Aim]()
        plan: Plan | None = None
        for aims in choices:
            won = self._search([Branch(aims, here, self._now, 0, False)], safe)
            if won is not None:
                plan = Plan(won, Outcome.WON)
                break
        return plan or self._draw(safe)

    def _draw(self, safe: Sequence[Aim]) -> Plan:
        # Always the same one may lead to the same rally for ever.
        if not safe:
            return Plan(CENTRED, Outcome.LOST)
        drawn = uniform(self._key, 1, start=len(self.played)).item()
        return Plan(safe[int(drawn * len(safe))], Outcome.SAFE)

    def _search(self, branches: list[Branch], safe: list[Aim]) -> Aim | None:
        """The first aim that wins; others that do not lose are added to ``safe``."""
        while branches:
            branches.sort(key=lambda branch: branch.aims[0], reverse=True)
            aims, outcome = self._play_ahead(branches)
            if outcome is Outcome.WON:
                return aims[0]
            if outcome is Outcome.SAFE:
                safe += aims
        return None

    def _play_ahead(self, branches: list[Branch]) -> tuple[Sequence[Aim], Outcome]:
        """Play the last branch on; what no longer presses alike becomes a branch."""
        aims, state, moment, first, left = branches.pop()
        self._ahead.load(state)
        for step in range(first, self._horizon):
            if not approaches(moment.field):
                left = True
                action = self._press(moment, None)
            elif left:
                break
            else:
                pressed: dict[int, list[Aim]] = {}
                for aim in aims:
                    pressed.setdefault(self._press(moment, aim), []).append(aim)
                (action, aims), *others = pressed.items()
                if others:
                    state = self._ahead.save()
                for _, rest in others:
                    branches.append(Branch(rest, state, moment, step, left))
            points = self._ahead.step(action)
            if points:
                return aims, Outcome.WON if points > 0 else Outcome.LOST
            moment = Moment(self._ahead.read(), self._rest_after(moment, action))
        return aims, Outcome.SAFE


def approaches(field: Field) -> bool:
    """Whether the ball comes towards our paddle and has not passed it."""
    return field.ball_y > 0 and field.across > 0 and field.ball_x <= HIT


def crossing(field: Field) -> float:
    """The row where an approaching ball will meet the paddle."""
    low, high = WALLS
    steps = (HIT - field.ball_x) / field.across
    folded = (field.ball_y + field.along * steps - low) % (2 * (high - low))
    return low + min(folded, 2 * (high - low) - folded)
