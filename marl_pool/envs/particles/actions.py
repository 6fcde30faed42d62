"""How particles are steered: five choices, or five numbers, as in MPE.

The choices are no-op, left, right, down and up. Of the five numbers in [0, 1] the
first does nothing and the others push to these sides at the same time.
"""

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

DIRECTIONS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
"""Of the choices, in their order."""


class Steering:
    """From actions to forces and back.

    Args:
        acceleration: the force of a full push to one side.
        continuous: five numbers in place of five choices.
        device: where the forces are to live.
        dtype: of the forces.
    """

    def __init__(
        self,
        acceleration: float,
        continuous: bool,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.acceleration, self.continuous = acceleration, continuous
        directions = torch.tensor(DIRECTIONS, device=device, dtype=dtype)
        self._pushes = directions * acceleration

    @property
    def space(self) -> spaces.Box | spaces.Discrete:
        """The action space of one agent."""
        if self.continuous:
            return spaces.Box(0, 1, (5,), np.float32)
        return spaces.Discrete(5)

    def forces(self, actions: Tensor) -> Tensor:
        """The forces of actions.

        Args:
            actions: ``(num_envs, agents, 5)`` float, clipped to [0, 1], or
                ``(num_envs, agents)`` int64.

        Returns:
            ``(num_envs, agents, 2)``.
        """
        if self.continuous:
            shares = actions.detach().to(self._pushes.dtype).clamp(0, 1)
            return (shares[..., 2::2] - shares[..., 1::2]).mul_(self.acceleration)
        return self.push(actions)

    def push(self, choices: Tensor) -> Tensor:
        """The forces ``(num_envs, agents, 2)`` of ``(num_envs, agents)`` choices."""
        # Flat, since index_select is several times faster than advanced indexing.
        chosen = self._pushes.index_select(0, choices.flatten())
        return chosen.view(*choices.shape, 2)

    def toward(self, force: Tensor) -> Tensor:
        """The actions whose force comes nearest to ``force`` ``(*B, 2)``.

        Returns:
            ``(*B, 5)`` float in [0, 1], or ``(*B,)`` int64.
        """
        return self._shares(force) if self.continuous else self._nearest(force)

    def _shares(self, force: Tensor) -> Tensor:
        share = (force / self.acceleration).clamp(-1, 1)
        left, down = (-share).clamp(min=0).unbind(-1)
        right, up = share.clamp(min=0).unbind(-1)
        return torch.stack((torch.zeros_like(left), left, right, down, up), -1)

    def _nearest(self, force: Tensor) -> Tensor:
        squares = (force[..., None, :] - self._pushes.to(force)).square().sum(-1)
        return squares.argmin(-1)
