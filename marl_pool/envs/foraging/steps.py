"""The grid's moves, and the step to a place on it."""

from itertools import chain

import torch
from torch import Tensor

from marl_pool.utils.devices import constant

NONE, LOAD = 0, 5
"""Actions besides the moves, which have the numbers 1 to 4."""
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Change of row and column by north, south, west and east."""
STEPS = tuple(chain(*MOVES))


def step_beside(
    place: Tensor, goal: Tensor, obstacles: Tensor, size: int | None = None
) -> Tensor:
    """Return the action that brings an agent beside a goal, or loads what is there.

    Beside the goal it is `LOAD`. Else it is the move to the free cell that is nearest,
    in a straight line, to a free side of the goal; `NONE` if all sides or moves are
    blocked.

    Args:
        place: ``(*B, 2)``, row and column of the agent.
        goal: ``(*B, 2)``, row and column of the goal.
        obstacles: ``(*B, K, 2)``, blocked cells, the goal included. Unused entries lie
            outside the grid.
        size: cells along a side of the grid, or None for no border.

    Returns:
        ``(*B,)`` int64.
    """
    moves = constant(STEPS, place.device, place.dtype).view(-1, 2)
    cells = place[..., None, :] + moves
    sides = goal[..., None, :] + moves
    around = torch.cat([cells, sides], -2)
    blocked = (around[..., None, :] == obstacles[..., None, :, :]).all(-1).any(-1)
    if size is not None:
        blocked |= ((around < 0) | (around >= size)).any(-1)
    cell_taken, side_taken = blocked.chunk(2, -1)
    away = (cells[..., :, None, :] - sides[..., None, :, :]).square().sum(-1)
    # Integers have no infinity.
    away = away.double().masked_fill(side_taken[..., None, :], torch.inf).amin(-1)
    distance, nearest = away.masked_fill(cell_taken, torch.inf).min(-1)
    action = torch.where(distance.isinf(), NONE, 1 + nearest)
    is_beside = (goal - place).abs().sum(-1) == 1
    return torch.where(is_beside, LOAD, action)
