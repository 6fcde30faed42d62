"""What to press in Pong so that a stroke wins, though some presses will stick."""

from functools import cache
from typing import NamedTuple

import numpy as np

from marl_pool.envs.pong_player import (
    DOWN,
    HIT,
    PUSH,
    PUSHES,
    UP,
    WAIT,
    Moment,
    Player,
    approaches,
    crossing,
)
from marl_pool.envs.pong_simulator import NOOP

CELL = PUSH / 3
"""Pixels from one place in the tables to the next: a push is three of them."""
SIDE = 40
"""Places on each side of the ball's crossing."""
PLACES = CELL * np.arange(-SIDE, SIDE + 1)
"""Paddle less ball, in pixels."""
FRAMES = 40
"""Emulated frames before the ball arrives that tables look ahead."""
LAG = 0.293
"""The share of the way to its rest that the paddle moves in a frame."""
HITS = (-19.5, 3.6)
"""Between them the paddle hits the ball."""
STEEP = (-13.0, -1.0)
"""Above the one the ball leaves two rows a frame down, below the other two rows up."""
FALLING = ((0, 127),)
"""Rows from which a ball that leaves steeply downwards wins."""
RISING = ((0, 69), (127, 165))
"""Rows from which one that leaves steeply upwards wins."""
KEPT, MISSED = 0.75, -1.0
"""What a stroke is worth that does not win, and none, if one that wins is worth 1."""
BLUR = 2.0
"""Pixels by which places are uncertain, a standard deviation."""
WAITING = 500.0
"""Pixels from where the paddle waits that cost a point, while no ball approaches."""
EFFORT = 0.004
"""What a press costs."""


CHOICES = (NOOP, DOWN, UP)
"""What a striker chooses from, in the order of `PUSHES` modulo 3."""


class Striker(Player):
    """A player who knows what each press is worth, and never plays ahead.

    Against the console a ball that leaves the paddle two rows a frame wins from some
    rows, and no other ball does. How likely a press is to bring the paddle where it
    hits the ball like that, and how likely to miss it, follows from how the paddle
    moves and how often presses stick: `solve`. All that counts can be seen.

    Args:
        frame_skip: emulated frames that an action lasts.
        sticky: probability that a frame of the game repeats the action before.
    """

    def __init__(self, frame_skip: int, sticky: float = 0.0) -> None:
        super().__init__(frame_skip, sticky)
        self.worth = np.zeros(len(CHOICES))
        """Of each of `CHOICES`, in points."""

    def _decide(self, departed: bool) -> None:
        self.worth = np.zeros(len(CHOICES))
        if not self.console.over:
            last = self.played[-1] if self.played else NOOP
            if approaches(self._now.field):
                frame_skip, sticky, _ = self.options
                self.worth = values(self._now, last, frame_skip, sticky)
            else:
                rests = self._now.rest + self._push * np.array([0, 1, -1])
                self.worth = -np.abs(rests - WAIT) / WAITING
        self.action = CHOICES[int(self.worth.argmax())]


class Tables(NamedTuple):
    """What each press is worth."""

    kinds: tuple[tuple[bool, bool], ...]
    """Rows by which shots win from there: downwards, upwards."""
    worth: np.ndarray
    """By frames left, kind, direction pressed last and now, rest and paddle."""


def wins(row: float) -> tuple[bool, bool]:
    """Whether steep shots downwards and upwards win from a row."""
    return tuple(
        any(low <= row < high for low, high in rows) for rows in (FALLING, RISING)
    )  # type: ignore[return-value]


def values(moment: Moment, last: int, frame_skip: int, sticky: float) -> np.ndarray:
    """What staying, down and up are worth, ``(3,)``, while the ball approaches.

    Args:
        moment: now.
        last: the native action before.
        frame_skip: emulated frames that an action lasts.
        sticky: probability that a frame repeats the action before.
    """
    tables = solve(frame_skip, sticky)
    field, row = moment.field, crossing(moment.field)
    left = max((HIT - field.ball_x) // field.across, 1)
    if left > FRAMES:
        left -= -(-(left - FRAMES) // frame_skip) * frame_skip
    kind = tables.kinds.index(wins(row))
    table = tables.worth[left, kind, PUSHES[last] % 3]
    rest, paddle = moment.rest - row, field.paddle_y - row
    if abs(rest) > PLACES[-1]:
        return np.array([0.0, -rest, rest]) / 100
    return _between(table, rest, paddle)


def _between(table: np.ndarray, rest: float, paddle: float) -> np.ndarray:
    """Read a table ``(3, rest, paddle)`` between its places."""
    places = np.clip(np.array([rest, paddle]) / CELL + SIDE, 0, 2 * SIDE - 0.001)
    (i, j), (x, y) = places.astype(int), places % 1
    near, far = ((1 - y) * table[:, k, j] + y * table[:, k, j + 1] for k in (i, i + 1))
    return (1 - x) * near + x * far


@cache
def solve(frame_skip: int, sticky: float) -> Tables:
    """Work back from the moment when the ball arrives."""
    kinds = tuple((down, up) for down in (False, True) for up in (False, True))
    ends = np.stack([_end(*kind) for kind in kinds]).astype(np.float32)
    count = len(PLACES)
    worth = np.zeros((FRAMES + 1, len(kinds), 3, 3, count, count), np.float32)
    rest, paddle = np.arange(count)[:, None], PLACES[None]
    for left in range(1, FRAMES + 1):
        frames = min(left, frame_skip)
        for last in range(3):
            for now in range(3):
                total = worth[left, :, last, now]
                for stuck in range(frames + 1):
                    chance = sticky**stuck * (1 - sticky if stuck < frames else 1)
                    moved, follow, lead, shift = _move(last, now, stuck, frames)
                    place = follow * paddle + lead * PLACES[:, None] + shift
                    place = np.clip(place / CELL + SIDE, 0, count - 1.001)
                    i, x = place.astype(int), (place % 1).astype(np.float32)
                    if left <= frame_skip:
                        low, high = ends[:, i], ends[:, i + 1]
                    else:
                        kept = now if stuck < frames else last
                        after = worth[left - frame_skip, :, kept].max(1)
                        to = np.clip(rest + moved, 0, count - 1)
                        low, high = after[:, to, i], after[:, to, i + 1]
                    total += chance * ((1 - x) * low + x * high)
                total -= EFFORT * (now > 0)
    return Tables(kinds, worth)


def _end(down: bool, up: bool) -> np.ndarray:
    """What the paddle's places are worth when the ball is there."""
    errors = np.linspace(-4, 4, 33)
    weights = np.exp(-(errors**2) / 2)
    places = PLACES[:, None] + BLUR * errors
    worth = np.full_like(places, KEPT)
    worth[(places <= STEEP[0]) & down] = 1.0
    worth[(places >= STEEP[1]) & up] = 1.0
    worth[(places < HITS[0]) | (places > HITS[1])] = MISSED
    return np.asarray(worth @ weights / weights.sum())


def _move(
    last: int, now: int, stuck: int, frames: int
) -> tuple[int, float, float, float]:
    """How rest and paddle move while the first frames of a press stick.

    Returns:
        Places that the rest moves; of the paddle's new place what its old one counts,
        what the old rest counts, and a shift.
    """
    signs = (0, 1, -1)
    follow, lead, shift, moved = 1.0, 0.0, 0.0, 0
    for frame in range(frames):
        follow, lead = (1 - LAG) * follow, (1 - LAG) * lead + LAG
        shift = (1 - LAG) * shift + LAG * moved * CELL
        moved += 3 * signs[last if frame < stuck else now]
    return moved, follow, lead, shift
