"""Level-based foraging: agents on a grid load food that may need several of them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, BatchedEnv, EnvOptions
from marl_pool.envs.drawing.canvas import GREEN, VERMILION, Disc, Frame, Projection
from marl_pool.envs.drawing.marks import Glyphs
from marl_pool.envs.foraging.steps import LOAD, MOVES, NONE, step_beside
from marl_pool.options.types import Episodes, NonNegativeFloat, Repeats, Size
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import SELF_TYPE, Tokens, TokenSpec, self_first
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform

TYPE_NAMES = ("self", "agent", "food")
FOOD_TYPE = TYPE_NAMES.index("food")
POSITION, LEVEL = (0, 1), 2
"""Indices of the features."""
NUM_ACTIONS = 6
FOOD_TEAM = 3
"""Number of agents, the weakest ones, whose levels together limit the level of food."""
RADIUS = 0.14
"""Radius of a disc of level 1, in cells."""
MOST_CELLS = 64
"""Cells along a side of the largest grid."""


class LevelBasedForaging(BatchedEnv):
    r"""Agents walk on a grid and load food, together where its level is high.

    Agents and food have levels. A piece of food is loaded if agents beside it, whose
    levels add up to its own or more, load in the same step. It is then gone, and each
    of them gets

    .. math:: r_i = \frac{l_i}{\sum_j l_j} \cdot \frac{l_{food}}{\sum_k l_{food_k}}

    with sums over the agents that loaded it and over all food of the episode, so the
    rewards of all agents add up to 1 if all food is loaded. With ``cooperative`` the
    level of food is the sum of the three lowest levels of agents, of all if there are
    fewer; else it is uniform between 1 and that sum. The episode ends when no food is
    left.

    An agent observes itself, the others and the food within its sight. A token has the
    row and column, relative to the agent's own except in its own token, and the level.
    Food that was loaded is padding.

    ``choices="moves"`` are lbforaging's six actions: none, north, south, west, east,
    load. Agents that would enter the same cell all stay, but others may still enter the
    cells in which these stay; a move into food or a wall, and a load without food
    beside the agent, count as none. With ``choices="food"`` an agent chooses none or
    food that it sees: it loads the food if it stands beside it, else it steps to the
    free cell that is nearest to a free side of the food. Agents step one after another,
    around each other. This is a `Selection`, for ``policy.action=select``.

    Source: `lbforaging 2.0 <https://github.com/semitable/lb-foraging>`_ of
    `Papoudakis et al. (2021) <https://arxiv.org/abs/2006.07869>`_; its
    ``Foraging-8x8-2p-2f-coop-v3`` is the default. A test compares rewards, observations
    and ends with it over random episodes, exactly. Differences: random numbers differ;
    starts do not depend on the previous episode, as the first player's does there;
    positions are relative; an episode that reaches ``max_steps`` is truncated, there it
    is over; food is placed without a limit on the number of tries.

    Args:
        size: cells along a side of the grid, at least 3.
        num_agents: number of agents.
        num_food: pieces of food at the start; fewer where no free cell is left that is
            neither at the border nor near other food.
        cooperative: all food needs the levels of the three weakest agents, or of all if
            there are fewer.
        max_level: highest level of an agent; the lowest is 1.
        sight: cells that an agent sees in each direction, or None for the whole grid.
        penalty: subtracted from the reward of a load that fails.
        choices: what an agent chooses: moves or food.

    Raises:
        InputError: a grid that is too small for its agents.
    """

    state_names: ClassVar[tuple[str, ...]] = (
        "places",
        "levels",
        "food_places",
        "food_levels",
        "food_total",
    )
    steps_past_end = True

    def __init__(
        self,
        num_envs: Episodes,
        *,
        size: Repeats = 8,
        num_agents: Repeats = 2,
        num_food: Repeats = 2,
        cooperative: bool = True,
        max_level: Repeats = 2,
        sight: Size | None = None,
        penalty: NonNegativeFloat = 0.0,
        choices: Literal["moves", "food"] = "moves",
        max_steps: Episodes = 50,
        **common: Unpack[EnvOptions],
    ) -> None:
        if not 3 <= size <= MOST_CELLS:
            raise InputError(f"env.size: expected 3 to {MOST_CELLS}, got {size}")
        if num_agents > size * size - 1:
            raise InputError(
                f"env.num_agents: expected at most {size * size - 1} on a grid of "
                f"{size}x{size} cells, got {num_agents}"
            )
        super().__init__(num_envs, max_steps=max_steps, **common)
        self.size, self.num_agents, self.num_food = size, num_agents, num_food
        self.cooperative, self.max_level = cooperative, max_level
        self.sight, self.penalty, self.choices = sight, penalty, choices
        num_tokens = num_agents + num_food
        spec = TokenSpec(
            *(num_tokens, 3, TYPE_NAMES), signal_types=TYPE_NAMES, positions=POSITION
        )
        space: spaces.Space[Any] = spaces.Discrete(NUM_ACTIONS)
        if selects := choices == "food":
            space = Selection(1, num_tokens, ("food",))
        group = AgentGroup(num_agents, spec, space, has_action_masks=selects)
        self.groups = {"agent": group}
        self._selection = SelectedTokens(spec, group.actions) if selects else None
        numbers = torch.arange(num_agents, device=self.device)
        self._order = self_first(numbers, num_agents)
        types = [0] + [1] * (num_agents - 1) + [2] * num_food
        self._types = self._constant(types, torch.int64)
        stay = (0, 0)
        self._moves = self._constant((stay, *MOVES, stay), torch.int64)
        self._cells = self._constant(
            [divmod(cell, size) for cell in range(size * size)], torch.int64
        )
        away = (self._cells - self._cells[:, None]).abs()
        straight = (away.amin(-1) == 0) & (away.amax(-1) <= 2)
        # Cells that food denies to other food, so that no cell is beside two pieces.
        self._crowded = straight | (away.amax(-1) <= 1)
        inner = (self._cells > 0) & (self._cells < size - 1)
        self._fields = inner.all(-1)
        self.places = torch.zeros(
            num_envs, num_agents, 2, dtype=torch.int64, device=self.device
        )
        self.levels = self.places[..., 0].clone()
        self.food_places = self.places.new_zeros(num_envs, num_food, 2)
        self.food_levels = self.places.new_zeros(num_envs, num_food)
        self.food_total = self.places.new_zeros(num_envs)

    @property
    @override
    def state_specs(self) -> dict[str, TokenSpec]:
        return {"agent": self.groups["agent"].tokens}

    @override
    def observe(self) -> dict[str, Tokens]:
        tokens = self._tokens(self.sight)
        if self._selection is not None:
            tokens = tokens._replace(action_mask=self._selection.options(tokens))
        return {"agent": tokens}

    @override
    def observe_state(self) -> dict[str, Tokens]:
        return {"agent": self._tokens(None)}

    def _tokens(self, sight: int | None) -> Tokens:
        """Return what agents with this sight observe, without an action mask."""
        batch = (self.num_envs, self.num_agents)
        agents = self.places[:, self._order]
        food = self.food_places[:, None].expand(*batch, -1, -1)
        place = self.places[:, :, None]
        away = torch.cat([agents, food], 2) - place
        levels = self.food_levels[:, None].expand(*batch, -1)
        levels = torch.cat([self.levels[:, self._order], levels], 2)
        absent = levels == 0
        if sight is not None:
            # Beside the border an agent sees others, but not food, from farther away.
            low = -torch.minimum(place, torch.full_like(place, sight))
            low = low.expand(-1, -1, self.num_agents, -1)
            low = torch.cat([low, torch.full_like(food, -sight)], 2)
            high = low + 2 * sight
            absent = absent | ((away < low) | (away > high)).any(-1)
        # An agent's own token has its place on the grid.
        away[:, :, 0] = self.places
        features = torch.cat([away, levels[..., None]], -1).to(self.dtype)
        return Tokens(features, self._types.expand_as(absent), absent)

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        agents, food = self.num_agents, self.num_food
        cell_draws, level_draws = uniform(keys, 2 * (agents + food)).chunk(2, 1)
        free = torch.ones(
            len(rows), len(self._cells), dtype=torch.bool, device=self.device
        )
        cells = []
        for draw in cell_draws[:, :agents].unbind(1):
            cells.append(_sample_cell(free, draw))
            free = free.scatter(1, cells[-1][:, None], False)
        levels = 1 + (level_draws[:, :agents] * self.max_level).long()
        # So the weakest agents together can load any food.
        max_level = levels.sort(1).values[:, :FOOD_TEAM].sum(1)
        min_level = max_level if self.cooperative else torch.ones_like(max_level)
        free, food_levels = free & self._fields, []
        for cell_draw, level_draw in zip(
            cell_draws[:, agents:].unbind(1),
            level_draws[:, agents:].unbind(1),
            strict=True,
        ):
            cells.append(_sample_cell(free, cell_draw))
            food_level = min_level + (level_draw * (max_level - min_level + 1)).long()
            # Level 0 is no food: there is no free cell left.
            food_levels.append(food_level.masked_fill(~free.any(1), 0))
            free = free & ~self._crowded[cells[-1]]
        places = self._cells[torch.stack(cells, 1)]
        parts = {
            "places": places[:, :agents],
            "levels": levels,
            "food_places": places[:, agents:],
            "food_levels": torch.stack(food_levels, 1),
        }
        parts["food_total"] = parts["food_levels"].sum(1)
        for name, part in parts.items():
            setattr(self, name, getattr(self, name).index_copy(0, rows, part))

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        action = actions["agent"]
        moves = action if self._selection is None else self._moves_to_food(action)
        present = self.food_levels > 0
        # Move, unless a wall, food or another agent's target is there.
        target = self.places + self._moves[moves]
        outside = ((target < 0) | (target >= self.size)).any(-1)
        food = self.food_places[:, None]
        on_food = ((target[:, :, None] == food).all(-1) & present[:, None]).any(-1)
        target = torch.where((outside | on_food)[..., None], self.places, target)
        beside = (food - self.places[:, :, None]).abs().sum(-1) == 1
        loads = beside & present[:, None] & (moves == LOAD)[..., None]
        meeting = (target[:, :, None] == target[:, None]).all(-1).sum(2)
        # Agents that want the same cell stay where they are.
        self.places = torch.where((meeting == 1)[..., None], target, self.places)
        # Load where the agents' levels suffice.
        strength = (loads * self.levels[..., None]).sum(1)
        loaded = loads.any(1) & (strength >= self.food_levels)
        # Loaders share food in proportion to their levels; all food of an episode is
        # worth 1.
        numerator = self.levels[..., None] * self.food_levels[:, None]
        denominator = (strength * self.food_total[:, None]).clamp(min=1)[:, None]
        reward = numerator.to(self.dtype) / denominator.to(self.dtype)
        reward = torch.where(loaded[:, None], reward, -self.penalty)
        reward = torch.where(loads, reward, 0).sum(2)
        self.food_levels = self.food_levels.masked_fill(loaded, 0)
        return {"agent": reward}, ~(self.food_levels > 0).any(1)

    def _moves_to_food(self, choice: Tensor) -> Tensor:
        """Return the moves ``(num_envs, agents)`` to chosen food; see the class."""
        number = choice - 1 - self.num_agents
        index = number.clamp(min=0)
        has_goal = (number >= 0) & (self.food_levels.gather(1, index) > 0)
        goals = self.food_places.gather(1, index[..., None].expand(-1, -1, 2))
        absent = (self.food_levels == 0)[..., None]
        # Outside of the grid, where nothing is blocked.
        food = self.food_places.masked_fill(absent, -2)
        # Agents step around the places that those before them move to.
        places, moves = self.places.clone(), []
        for agent in range(self.num_agents):
            planned = places.clone()
            # An agent is no obstacle to itself.
            planned[:, agent] = -2
            obstacles = torch.cat([food, self.places, planned], 1)
            obstacles[:, self.num_food + agent] = -2
            arguments = self.places[:, agent], goals[:, agent], obstacles
            move = step_beside(*arguments, self.size)
            moves.append(torch.where(has_goal[:, agent], move, NONE))
            places[:, agent] += self._moves[moves[-1]]
        return torch.stack(moves, 1)

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        levels = self.levels[index].tolist()
        food = self.food_levels[index].tolist()
        places = torch.cat([self.places[index], self.food_places[index]])
        points = self._points(places.cpu().numpy())
        frame = Frame(Projection(self.size / 2, size))
        if weights is not None:
            order = [*self._order[agent].tolist(), *range(len(levels), len(points))]
            frame.attention(points[order], 0, weights)
        looks = [Disc("agent", GREEN, RADIUS * level**0.5) for level in levels]
        looks += [Disc("food", VERMILION, RADIUS * level**0.5) for level in food]
        visible = [look.radius > 0 for look in looks]
        frame.discs(
            [look for look in looks if look.radius], points[visible], points[visible]
        )
        frame.legend(
            [Disc("agent", GREEN, 2 * RADIUS), Disc("food", VERMILION, 2 * RADIUS)]
        )
        return frame.image

    def _points(self, places: np.ndarray) -> np.ndarray:
        """Return rows and columns ``(n, 2)`` as points, the first row on top."""
        half = (self.size - 1) / 2
        return np.stack([places[:, 1] - half, half - places[:, 0]], 1)

    @override
    def glyphs(
        self, tokens: Tokens, index: int, *, group: str, agent: int, size: int
    ) -> Glyphs:
        features = tokens.features.double().nan_to_num().cpu()
        is_self = (tokens.types == SELF_TYPE)[:, None].cpu()
        place = self.places[index, agent].double().cpu()
        cells = features[:, POSITION] + torch.where(is_self, 0, place)
        projection = Projection(self.size / 2, size)
        points = projection.project(self._points(cells.numpy()))
        levels = features[:, LEVEL].clamp(min=0).sqrt().tolist()
        is_food = tokens.types == FOOD_TYPE
        colors = [VERMILION if food else GREEN for food in is_food.tolist()]
        return Glyphs(
            places=points,
            colors=colors,
            radii=[max(projection.pixels(RADIUS * root), 4) for root in levels],
            letters=[""] * len(points),
        )


def _sample_cell(free: Tensor, draw: Tensor) -> Tensor:
    """Return a free cell of each row ``(k, cells)``, the first one if there is none.

    Args:
        free: bool.
        draw: ``(k,)`` uniform in (0, 1).
    """
    count = free.cumsum(1)
    rank = (draw * count[:, -1]).long()
    cell = (count <= rank[:, None]).sum(1)
    return cell.masked_fill(cell == free.shape[1], 0)
