"""Action spaces of particles, as in MPE.

A discrete action is one of five choices: no-op, left, right, down, up. A continuous
action is five numbers in [0, 1]: the first has no effect, and the others push left,
right, down and up at the same time.
"""

import torch
from gymnasium import spaces
from torch import Tensor

DIRECTIONS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
"""Direction of each discrete choice."""


class Steering:
    """Conversion of actions to forces and back.

    Args:
        acceleration: force of a full push to one side.
        continuous: True for five numbers, False for five choices.
        device: device of the forces.
        dtype: dtype of the forces.
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
        """Action space of one agent."""
        return spaces.Box(0, 1, (5,)) if self.continuous else spaces.Discrete(5)

    def forces(self, actions: Tensor) -> Tensor:
        """Convert actions to forces ``(num_envs, agents, 2)``; numbers are clipped."""
        if self.continuous:
            pushes = actions.detach().to(self._pushes.dtype).clamp(0, 1)
            # Right minus left, up minus down.
            return (pushes[..., 2::2] - pushes[..., 1::2]).mul_(self.acceleration)
        return self.push(actions)

    def push(self, choices: Tensor) -> Tensor:
        """Convert choices ``(num_envs, agents)`` to forces ``(…, 2)``."""
        # Flat, since index_select is several times faster than advanced indexing.
        chosen = self._pushes.index_select(0, choices.flatten())
        return chosen.view(*choices.shape, 2)

    def toward(self, force: Tensor) -> Tensor:
        """Find the actions whose force is nearest to ``force`` ``(*B, 2)``."""
        if not self.continuous:
            away = force[..., None, :] - self._pushes.to(force)
            return away.square().sum(-1).argmin(-1)
        push = (force / self.acceleration).clamp(-1, 1)
        left, down = (-push).clamp(min=0).unbind(-1)
        right, up = push.clamp(min=0).unbind(-1)
        return torch.stack((torch.zeros_like(left), left, right, down, up), -1)
