"""Codes of the contents of a BoxWorld cell, and the rules for them."""

from functools import cache

from marl_pool.envs.drawing.canvas import Color

KEY_REWARD = 1.0
"""Reward of the loose key, and of each box on the path but the last."""
GEM_REWARD = 10.0
DISTRACTOR_REWARD = -1.0

NO_COLOR: Color = (0, 0, 0)
FLOOR_COLOR: Color = (220, 220, 220)
AGENT_COLOR: Color = (128, 128, 128)
GEM_COLOR: Color = (255, 255, 255)
KEY_COLORS: tuple[Color, ...] = (
    (128, 0, 0),
    (230, 25, 75),
    (250, 190, 190),
    (154, 99, 36),
    (245, 130, 49),
    (255, 216, 177),
    (128, 128, 0),
    (255, 255, 25),
    (255, 250, 200),
    (191, 239, 69),
    (60, 180, 75),
    (170, 255, 195),
    (70, 153, 144),
    (66, 212, 244),
    (0, 0, 117),
    (67, 99, 216),
    (145, 30, 180),
    (230, 190, 255),
    (240, 50, 230),
)
"""Colors of keys and their locks, from the published environment of AdaPool."""

COLORS = len(KEY_COLORS)

# The content of a cell is one code. Codes of one kind in all colors are contiguous,
# and codes that can be picked up or opened come last.
NOTHING = 0
FLOOR = 1
AGENT = 2
GEM = 3  # in a box
HELD_GEM = 4
KEY = 5  # in a box
HELD = KEY + COLORS
LOOSE = HELD + COLORS
LOCK = LOOSE + COLORS  # of a box on the path that holds a key
GOAL = LOCK + COLORS  # of the box that holds the gem
TRAP = GOAL + COLORS  # of a distractor box
CODES = TRAP + COLORS

TYPE_NAMES = ("self", "floor", "key", "lock", "gem", "held")


_KINDS = ("key", "held", "key", "lock", "lock", "lock")
CODE_TYPES = ["held", "floor", "self", "gem", "held"]
CODE_TYPES += [kind for kind in _KINDS for _ in KEY_COLORS]
"""Token type of each code."""
CODE_COLORS = [NO_COLOR, FLOOR_COLOR, AGENT_COLOR, GEM_COLOR, GEM_COLOR]
CODE_COLORS += KEY_COLORS * len(_KINDS)
"""Color of each code; distractors look like boxes on the path."""


@cache
def entries() -> list[list[int]]:
    """Return the table of moves, ``table[held][ahead]``.

    An entry is ``ahead`` if an agent that holds ``held`` can move there, else NOTHING.
    """

    def can_enter(held: int, code: int) -> bool:
        if code >= LOCK:
            return held >= HELD and held - HELD == (code - LOCK) % COLORS
        return code in (FLOOR, AGENT) or code >= LOOSE

    codes = range(CODES)
    return [[c if can_enter(held, c) else NOTHING for c in codes] for held in codes]


def in_hand(code: int) -> int:
    """Return the code of an item once it is held; NOTHING if it cannot be taken."""
    if code == GEM:
        return HELD_GEM
    if KEY <= code < HELD or LOOSE <= code < LOCK:
        return HELD + (code - KEY) % COLORS
    return NOTHING


def reward_of(code: int) -> float:
    """Return the reward of moving onto ``code``."""
    if code < LOOSE:
        return 0.0
    if code < GOAL:
        return KEY_REWARD
    return GEM_REWARD if code < TRAP else DISTRACTOR_REWARD
