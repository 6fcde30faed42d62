"""Perturbed observations compared with what the environment showed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from marl_pool.tokens import Tokens, take_features


class Mark(Enum):
    """Difference between perceived tokens and true ones; the value explains it."""

    HIDDEN = "not perceived"
    INJECTED = "not in the environment"
    ALTERED = "as perceived"
    RETYPED = "perceived type (rim: true)"
    REPEATED = "perceived twice"
    REORDERED = "another order"


@dataclass(frozen=True)
class Perception:
    """Tokens that policies perceive, and the true ones behind them.

    Batch dimensions B are ``(num_envs, agents)``; `at` selects from them.
    """

    true: Tokens
    """The N unperturbed tokens of each agent."""
    seen: Tokens
    """The M tokens that its policy receives."""
    origin: Tensor
    """``(*B, M)`` int64, index of the true token behind each one seen, -1 for none."""
    removed: Tensor
    """``(*B, N)`` bool, true tokens of which the policy learns nothing."""
    label: str
    """Name of the change in a legend."""

    @classmethod
    def compare(
        cls, true: Tokens, perceived: Tokens, origin: Tensor, label: str
    ) -> "Perception":
        """Find the tokens that no perceived one shows; see the attributes."""
        visible = ~perceived.padding & (origin >= 0)
        count = torch.zeros_like(true.types)
        count.scatter_add_(-1, origin.clamp(min=0), visible.long())
        return cls(true, perceived, origin, ~true.padding & (count == 0), label)

    def at(self, index: Any) -> "Perception":
        """Apply ``[index]`` to the batch dimensions."""
        return self._map(lambda part: part[index])

    def cpu(self) -> "Perception":
        """Move all tensors to the host."""
        return self._map(Tensor.cpu)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Perception":
        true, perceived = self.true.map(function), self.seen.map(function)
        origin, removed = function(self.origin), function(self.removed)
        return Perception(true, perceived, origin, removed, self.label)

    @property
    def known(self) -> Tensor:
        """``(*B, M)`` bool, perceived tokens that show a true one."""
        return ~self.seen.padding & (self.origin >= 0)

    @property
    def injected(self) -> Tensor:
        """``(*B, M)`` bool, perceived tokens that the environment lacks."""
        return ~self.seen.padding & (self.origin < 0)

    def marks(self) -> dict[Mark, Tensor]:
        """Return the differences that occur, with the tokens that have them.

        Masks are ``(*B, N)`` bool for `Mark.HIDDEN` and ``(*B, M)`` for the others.
        """
        genuine, source = self.known, self.origin.clamp(min=0)
        # Compare with the true token behind each one: features, type and slot.
        features = take_features(self.true.features, source)
        altered = (features != self.seen.features).any(-1)
        retyped = self.true.types.gather(-1, source) != self.seen.types
        slots = torch.arange(self.origin.shape[-1], device=self.origin.device)
        moved = (self.origin != slots) & (slots < self.true.num_tokens)
        # Find tokens whose true token an earlier one shows as well.
        same = self.origin[..., :, None] == self.origin[..., None, :]
        repeated = same & genuine[..., :, None] & genuine[..., None, :]
        masks = {
            Mark.HIDDEN: self.removed,
            Mark.INJECTED: self.injected,
            Mark.ALTERED: genuine & altered,
            Mark.RETYPED: genuine & retyped,
            Mark.REPEATED: repeated.tril(-1).any(-1),
            Mark.REORDERED: genuine & moved,
        }
        return {mark: mask for mark, mask in masks.items() if mask.any()}

    def by_origin(self, weights: Tensor) -> Tensor:
        """Sum weights ``(*B, M)`` of perceived tokens by true token, ``(*B, N)``."""
        total = weights.new_zeros(self.true.types.shape)
        true_weights = weights.masked_fill(~self.known, 0)
        return total.scatter_add(-1, self.origin.clamp(min=0), true_weights)
