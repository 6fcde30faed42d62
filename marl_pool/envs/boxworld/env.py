"""BoxWorld: open boxes with keys to get keys, until one holds the gem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, BatchedEnv, EnvOptions
from marl_pool.envs.boxworld.codes import (
    AGENT,
    CODE_COLORS,
    CODE_TYPES,
    CODES,
    FLOOR,
    GEM,
    GOAL,
    HELD,
    HELD_GEM,
    KEY,
    LOCK,
    LOOSE,
    NOTHING,
    TRAP,
    TYPE_NAMES,
    entries,
    in_hand,
    reward_of,
)
from marl_pool.envs.boxworld.levels import LevelGenerator, LevelStock
from marl_pool.envs.drawing.canvas import ATTENTION, Color, attention_strengths, blend
from marl_pool.envs.drawing.marks import Glyphs
from marl_pool.options.types import (
    AtMost,
    Episodes,
    Size,
    SizeOrZero,
)
from marl_pool.tokens import Tokens, TokenSpec

POSITION = (3, 4)
"""Indices of the row and the column in a token's features."""
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Change of row and column by each action: up, down, left, right."""

WALL: Color = (25, 25, 25)
LINE: Color = (200, 200, 200)
GAP = 0.03
"""Fraction of a cell's side left free, so that equal neighbors are distinct."""
MAX_RIM = 0.2
"""Fraction of a cell's side that the rim of the strongest attention takes."""


@dataclass(frozen=True)
class BoxWorldGroup(AgentGroup):
    """The agent of a BoxWorld."""

    n: int
    """Cells along a side of its room; the unit of positions is n + 1 cells."""


class BoxWorld(BatchedEnv):
    r"""An agent opens boxes in the right order to reach a gem.

    The agent walks up, down, left or right in a room of n × n cells. Walking onto the
    loose key takes it. A box is two adjacent cells: its content, left, and its lock,
    right. Walking onto the lock opens the box if the agent holds a key of the lock's
    color: key and lock vanish, the agent moves to the lock's cell and holds the
    content, another key or the gem. Walls, contents and locks of other colors block
    the way, and the agent stays in its cell.

    The loose key begins a chain of boxes, the last of which holds the gem. Keys of that
    chain also open distractor boxes; see `LevelGenerator`. The loose key and each box
    of the chain with a key give a reward of +1. The box with the gem gives +10 and ends
    the episode, a distractor box gives -1 and ends it. After ``max_steps`` an episode
    is truncated. The best return is ``goal_length + 9``: 11 with the default options.

    Every level can be solved. With the default options the shortest way to the gem had
    10.2 steps on average and at most 23 in ten thousand levels, fewer than
    ``max_steps`` (``tests/envs/boxworld/test_boxworld_solver.py``). Longer chains in
    larger rooms require a larger ``max_steps``.

    A token has the cell's color, RGB in [0, 1], and the cell's row and column relative
    to the agent's, divided by n + 1. Its types are ``self``, ``floor``, ``key``,
    ``lock``, ``gem`` and ``held``. The held key is in the corner of the wall.

    - ``"pixels"``: the held key, then the cells row by row: n² + 1 tokens.
    - ``"entities"``: self, the loose or the held key, of which exactly one exists,
      then content and lock of each box in reading order:
      2 + 2 · (goal_length - 1 + num_distractors · distractor_length) tokens.

    A missing held key and opened boxes are padding.

    Source: `AdaPool <https://arxiv.org/abs/2506.09215>`_, sections 4.4 and C.6, and the
    published environment. The task is from `Zambaldi et al., 2019
    <https://arxiv.org/abs/1806.01830>`_, where the agent walks onto a key after opening
    its box and the loose key gives no reward. Differences from AdaPool's published
    environment:

    - Padding is masked; there, padded tokens took part in attention.
    - The agent's own token is found by its type; there AdaPool's query was the first
      token, padding or floor, while the own token was the last.
    - Order: as above; there padding, then cells row by row, then self.
    - ``num_distractors`` is the number of branches, as in the paper; there it was
      sampled from 0 to that at each reset, as with ``random_distractors``.
    - Boxes and the loose key do not touch each other, as in Zambaldi et al., so that
      every level can be solved; there a box could be directly above another.
    - The loose key may be in any free cell, in a fifth of the levels in the last
      column; there never in the last column.
    - A branch of several boxes is a chain; there the contents were mixed up.
    - The seed determines the level, and observations are float32, as in their space.

    Args:
        n: cells along a side.
        goal_length: number of keys and gem to collect; the chain has one box fewer.
        num_distractors: branches that lead nowhere.
        distractor_length: boxes of a branch; opening the first ends the episode, so the
            others are never reached.
        random_distractors: True to sample the number of branches at each reset,
            uniformly from 0 to ``num_distractors``.
        observation: kind of the tokens, as above.

    Raises:
        InputError: more boxes than fit into the room.
    """

    state_names = ("codes", "places")
    shows_state = True
    codes: Tensor
    """``(num_envs, n² + 2)`` int64, the code of each place; see `Levels`."""
    places: Tensor
    """``(num_envs, tokens)`` int64, the place of each token; with pixels only the
    agent's own."""
    _stock: LevelStock | None

    def __init__(
        self,
        num_envs: Episodes,
        *,
        n: Annotated[int, Field(ge=3, le=32)] = 7,
        goal_length: Annotated[int, Field(ge=2), AtMost(16_384)] = 2,
        num_distractors: SizeOrZero = 2,
        distractor_length: Size = 1,
        random_distractors: bool = False,
        observation: Literal["entities", "pixels"] = "entities",
        max_steps: Episodes = 30,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        self.n, self.pixels = n, observation == "pixels"
        self.generator = LevelGenerator(
            n,
            goal_length,
            num_distractors,
            distractor_length,
            random_distractors,
            self.device,
        )
        # Tokens are all cells and the held key, or the agent, the key and the boxes.
        num_tokens = n**2 + 1 if self.pixels else 2 + 2 * self.generator.num_boxes
        spec = TokenSpec(num_tokens, 5, TYPE_NAMES, positions=POSITION)
        group = BoxWorldGroup(1, spec, spaces.Discrete(len(MOVES)), n)
        self.groups = {"agent": group}
        self._build_tables()
        # Codes of the cells, and the cells of the tokens.
        places = self.env_ids.new_zeros(num_envs, 1 if self.pixels else num_tokens)
        codes = self.env_ids.new_full((num_envs, n**2 + 2), FLOOR)
        self._set_tensors({"codes": codes, "places": places})

    @override
    def observe(self) -> dict[str, Tokens]:
        # Add each token's color to its position relative to the agent.
        agent_places = self.places[:, 0]
        if self.pixels:
            codes = self.codes[:, :-1].flatten()
            features = self._offsets.index_select(0, agent_places)
        else:
            codes = self.codes.gather(1, self.places).flatten()
            offset_rows = torch.add(
                self.places, agent_places[:, None], alpha=self.n**2 + 2
            )
            features = self._offsets.index_select(0, offset_rows.flatten())
        shape = (self.num_envs, 1, -1)
        features = features.view(len(codes), 5)
        features.add_(self._colors.index_select(0, codes))
        types = self._types.index_select(0, codes).view(shape)
        padding = self._empty.index_select(0, codes).view(shape)
        # The agent's own token always exists.
        if not self.pixels:
            padding[..., 0] = False
        return {"agent": Tokens(features.view(*shape, 5), types, padding)}

    @override
    def signal(self) -> dict[str, Tensor]:
        """Return masks of self, keys in hand or loose, and boxes on the path.

        Types do not distinguish branches from the path, but codes do. Floor is noise.
        """
        codes = self.codes
        # Boxes on the path have other codes than traps.
        lock = (codes >= LOCK) & (codes < TRAP)
        # The lock of a box is right of its content.
        beside = torch.nn.functional.pad(lock[:, 1:], (0, 1))
        content = (codes == GEM) | ((codes >= KEY) & (codes < HELD))
        key = (codes == HELD_GEM) | ((codes >= HELD) & (codes < LOCK))
        useful = (codes == AGENT) | key | lock | (content & beside)
        useful = useful[:, :-1] if self.pixels else useful.gather(1, self.places)
        return {"agent": useful[:, None] & ~self.observe()["agent"].padding}

    def token_places(self, index: int) -> Tensor:
        """Return the places ``(N,)`` of tokens in one environment; see `Levels`."""
        if self.pixels:
            return torch.arange(self.n**2 + 1, device=self.device)
        return self.places[index]

    def cell_colors(self, index: int) -> Tensor:
        """Return the colors ``(n² + 1, 3)`` uint8 of the held key and of the cells."""
        return (self._colors[self.codes[index, :-1], :3] * 255).round().byte()

    @override
    def renumber(self, env_ids: Tensor, episode: int) -> None:
        super().renumber(env_ids, episode)
        self._stock = None

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        strengths = np.zeros(self.n**2 + 1)
        if weights is not None:
            places = self.token_places(index).cpu().numpy()
            by_place = np.bincount(places, weights, self.n**2 + 2)[:-1]
            strengths = attention_strengths(by_place)
        # A wall of one cell surrounds the room; the held key is in its corner.
        side = size / (self.n + 2)
        image = np.full((size, size, 3), WALL, np.uint8)
        _fill_square(image, (1, 1), side, (0, self.n), LINE)
        for place, color in enumerate(self.cell_colors(index).tolist()):
            if place == 0 and color == [0, 0, 0]:
                continue  # no key is held
            row, column = divmod(place - 1, self.n) if place else (-1, -1)
            cell, strength = (row + 1, column + 1), float(strengths[place])
            if strength > 0:
                # Attention is a rim, which is brighter and wider for a larger weight.
                rim = blend(ATTENTION, 0.15 + 0.85 * strength, LINE)
                _fill_square(image, cell, side, (GAP, 1 - GAP), rim)
            inset = GAP + MAX_RIM * strength
            _fill_square(image, cell, side, (inset, 1 - inset), color)
        return image

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        if self._stock is None:
            self._stock = LevelStock(
                self.generator, self.sample_uniform, self.seed, self.env_ids
            )
        levels = self._stock.select(rows, self.episodes)
        self.codes[rows] = levels.codes
        self.places[rows, 0] = levels.agent
        if not self.pixels:
            self.places[rows, 1] = levels.key
            self.places[rows, 2:] = levels.boxes.flatten(1)

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        # Find the place ahead of the agent; at a wall it is the agent's own.
        codes, place = self.codes, self.places[:, :1]
        ahead = self._neighbors[place, actions["agent"]]
        held, beside = codes[:, :1], ahead - 1
        # The code that the agent moves onto, or NOTHING if the way is blocked.
        meeting = torch.add(codes.gather(1, ahead), held, alpha=CODES)
        entered = _look_up(self._entered, meeting)
        # An opened box yields its content; a loose key is taken itself.
        opened, takes = entered >= LOCK, entered >= LOOSE
        content = codes.gather(1, beside)
        item = torch.where(opened, content, entered)
        hand = torch.where(takes, _look_up(self._held, item), held)
        after = torch.where(entered == NOTHING, place, ahead)
        # Remove content and lock of an opened box, then move the agent.
        codes.scatter_(1, beside, content.masked_fill_(opened, FLOOR))
        codes.scatter_(1, place, FLOOR).scatter_(1, after, AGENT)
        codes[:, :1] = hand
        self.places[:, :1] = after
        # The loose key's token becomes the held key's.
        if not self.pixels:
            self.places[:, 1:2].masked_fill_(takes, 0)
        ends = _look_up(self._ends, entered)
        return {"agent": _look_up(self._rewards, entered)}, ends[:, 0]

    @override
    def glyphs(
        self, tokens: Tokens, index: int, *, group: str, agent: int, size: int
    ) -> Glyphs:
        # Rows and columns are relative to the agent's; the wall adds one to both.
        features = tokens.features.double().nan_to_num().cpu().numpy()
        agent_cell = divmod(int(self.places[index, 0]) - 1, self.n)
        cells = features[:, POSITION] * (self.n + 1) + agent_cell + 1.5
        side = size / (self.n + 2)
        colors = np.clip(255 * features[:, :3], 0, 255).round().astype(int)
        return Glyphs(
            places=cells[:, ::-1] * side,
            colors=[(red, green, blue) for red, green, blue in colors.tolist()],
            radii=[0.3 * side] * len(features),
            letters=[TYPE_NAMES[number][0] for number in tokens.types.tolist()],
        )

    @override
    def _reset_keys(self, rows: Tensor) -> Tensor:
        # The stock of levels computes the keys of many episodes at once.
        return rows

    def _build_tables(self) -> None:
        # Tables hold whole tokens, so that one addition joins color and position.
        self._colors = self._constant([(*color, 0, 0) for color in CODE_COLORS]) / 255
        types = [TYPE_NAMES.index(name) for name in CODE_TYPES]
        self._types = self._constant(types, torch.int64)
        # A token whose entity is gone is padding; the agent's cell is shown by its own
        # token only.
        none = (NOTHING,) if self.pixels else (NOTHING, FLOOR, AGENT)
        self._empty = self._constant([i in none for i in range(CODES)], torch.bool)
        self._rewards = self._constant([reward_of(i) for i in range(CODES)])
        self._ends = self._constant([i >= GOAL for i in range(CODES)], torch.bool)
        self._held = self._constant([in_hand(i) for i in range(CODES)], torch.int64)
        self._entered = self._constant(entries(), torch.int64).flatten()
        # Places by row and column: the held key, the cells, one place for absent boxes.
        line = torch.arange(1, self.n + 1, device=self.device)
        cells = torch.cartesian_prod(line, line)
        ahead = (cells[:, None] + self._constant(MOVES, torch.int64)).clamp(1, self.n)
        ahead = (ahead[..., 0] - 1) * self.n + ahead[..., 1]
        # The place ahead by place and action; at a wall, the place itself.
        self._neighbors = torch.nn.functional.pad(ahead, (0, 0, 1, 0))
        # Tokens without color, by the place of the agent and of the token: for pixels
        # ``(n² + 2, n² + 1, 5)``, else ``((n² + 2)², 5)``.
        places = torch.nn.functional.pad(cells.to(self.dtype), (0, 0, 1, 1))
        away = (places - places[:, None]) / (self.n + 1)
        offsets = torch.nn.functional.pad(away, (3, 0))
        self._offsets = (
            offsets[:, :-1].contiguous() if self.pixels else offsets.flatten(0, 1)
        )

    @override
    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super()._set_tensors(tensors)
        self._stock = None  # the tensors may belong to other environments


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    """Look up ``(B, 1)`` indices, several times faster than indexing by []."""
    return table.index_select(0, indices[:, 0])[:, None]


def _fill_square(
    image: np.ndarray,
    cell: tuple[int, int],
    side: float,
    reach: tuple[float, float],
    color: Sequence[int],
) -> None:
    """Fill a square from ``reach[0]`` to ``reach[1]`` sides from a cell's corner."""
    top_edge, left_edge = (round((at + reach[0]) * side) for at in cell)
    bottom_edge, right_edge = (round((at + reach[1]) * side) for at in cell)
    image[top_edge:bottom_edge, left_edge:right_edge] = color
