"""Reference policy of level-based foraging."""

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.foraging.env import LEVEL, POSITION, TYPE_NAMES
from marl_pool.envs.foraging.steps import NONE, STEPS, step_beside
from marl_pool.envs.scripted import Heuristic
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.devices import constant

FAR = 1 << 12
"""Row and column of a cell that is outside every grid."""


class ForagingHeuristic(Heuristic):
    """Go to the food with the least total distance to the agents in sight, and load it.

    The food's level must be at most the sum of theirs. So agents that see each other
    choose the same food; of equally near food, the first by row and column.
    `Decision.logits` is the sum of distances to it.

    Source: H4 of lbforaging. Differences: the sum of distances along rows and columns,
    there the distance to the center; a way around obstacles, there a random move where
    the straight way is blocked; and two agents do not step into the same cell.

    Args:
        group: the group of the agents.
    """

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        self.actions = group.actions

    @override
    def choose(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        features, types, padding = tokens[:3]
        cells = features[..., POSITION].masked_fill(padding[..., None], FAR).long()
        is_self = (types == SELF_TYPE) & ~padding
        is_agent = (types == TYPE_NAMES.index("agent")) & ~padding
        is_food = (types == TYPE_NAMES.index("food")) & ~padding
        # The agent's own token has its place on the grid; all else is relative to it.
        agent_place = (cells * is_self[..., None]).sum(-2, keepdim=True)
        cells = cells.masked_fill(is_self[..., None], 0)
        team = is_self | is_agent
        levels = features[..., LEVEL].nan_to_num()
        strength = (levels * team).sum(-1, keepdim=True)
        away = (cells[..., :, None, :] - cells[..., None, :, :]).abs().sum(-1)
        distance = (away * team[..., None, :]).sum(-1).double()
        row, column = (cells + agent_place).unbind(-1)
        order = (row * FAR + column).double() / FAR**2
        fits = is_food & (levels <= strength)
        if tokens.action_mask is not None:
            fits = fits & tokens.action_mask[..., self.actions.num_fixed :]
        score = (distance + order).masked_fill(~fits, torch.inf)
        best, slot = score.min(-1)
        logits = best.nan_to_num(posinf=0.0)[..., None].to(features.dtype)
        has_goal = best.isfinite()
        if self.actions.selects:
            choice = torch.where(has_goal, self.actions.num_fixed + slot, 0)
            return choice, logits
        goals = cells.gather(-2, slot[..., None, None].expand_as(cells))
        occupied = cells.masked_fill(~(is_agent | is_food)[..., None], FAR)
        obstacles = occupied[..., None, :, :]
        # Give way to agents that come before this one by row and column.
        moves = constant((0, 0, *STEPS, 0, 0), cells.device).view(-1, 2)
        following = cells + moves[step_beside(cells, goals, obstacles)]
        place = row * FAR + column
        comes_before = place < (place * is_self).sum(-1, keepdim=True)
        planned = following.masked_fill(~(is_agent & comes_before)[..., None], FAR)
        move = step_beside(
            torch.zeros_like(goals[..., 0, :]),
            goals[..., 0, :],
            torch.cat([occupied, planned], -2),
        )
        return torch.where(has_goal, move, NONE), logits
