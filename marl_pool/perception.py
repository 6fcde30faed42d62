"""Perturbed observations compared with what the environment showed."""

from collections.abc import Callable
from dataclasses import dataclass, fields
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
    word: str
    """Participle that names the change in a legend."""

    @classmethod
    def compare(
        cls, true: Tokens, seen: Tokens, origin: Tensor, word: str
    ) -> "Perception":
        """Find the tokens that no perceived one shows; arguments as the attributes."""
        shown = ~seen.padding & (origin >= 0)
        count = torch.zeros_like(true.types)
        count.scatter_add_(-1, origin.clamp(min=0), shown.long())
        return cls(true, seen, origin, ~true.padding & (count == 0), word)

    def at(self, index: Any) -> "Perception":
        """Apply ``[index]`` to the batch dimensions."""
        return self._map(lambda part: part[index])

    def cpu(self) -> "Perception":
        """Move all tensors to the host."""
        return self._map(Tensor.cpu)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Perception":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tokens):
                parts[name] = part.map(function)
            elif isinstance(part, Tensor):
                parts[name] = function(part)
        return Perception(**parts)

    @property
    def known(self) -> Tensor:
        """``(*B, M)`` bool, perceived tokens that show a true one."""
        return ~self.seen.padding & (self.origin >= 0)

    @property
    def injected(self) -> Tensor:
        """``(*B, M)`` bool, perceived tokens that the environment has not."""
        return ~self.seen.padding & (self.origin < 0)

    @property
    def repeated(self) -> Tensor:
        """``(*B, M)`` bool, tokens whose true one an earlier token shows too."""
        same = self.origin[..., :, None] == self.origin[..., None, :]
        both = same & self.known[..., :, None] & self.known[..., None, :]
        return both.tril(-1).any(-1)

    @property
    def altered(self) -> Tensor:
        """``(*B, M)`` bool, tokens with other features than their true ones."""
        true = take_features(self.true.features, self.origin.clamp(min=0))
        return self.known & (true != self.seen.features).any(-1)

    @property
    def retyped(self) -> Tensor:
        """``(*B, M)`` bool, tokens with another type than their true ones."""
        true = self.true.types.gather(-1, self.origin.clamp(min=0))
        return self.known & (true != self.seen.types)

    @property
    def reordered(self) -> Tensor:
        """``(*B, M)`` bool, tokens in another slot than their true ones."""
        slots = torch.arange(self.origin.shape[-1], device=self.origin.device)
        moved = (self.origin != slots) & (slots < self.true.num_tokens)
        return self.known & moved

    def marks(self) -> dict[Mark, Tensor]:
        """Return the differences that occur, with the tokens that have them.

        Masks are ``(*B, N)`` bool for `Mark.HIDDEN` and ``(*B, M)`` for the others.
        """
        masks = {
            Mark.HIDDEN: self.removed,
            Mark.INJECTED: self.injected,
            Mark.ALTERED: self.altered,
            Mark.RETYPED: self.retyped,
            Mark.REPEATED: self.repeated,
            Mark.REORDERED: self.reordered,
        }
        return {mark: mask for mark, mask in masks.items() if mask.any()}

    def by_origin(self, weights: Tensor) -> Tensor:
        """Sum weights ``(*B, M)`` of perceived tokens by true token, ``(*B, N)``."""
        total = weights.new_zeros(self.true.types.shape)
        known = weights.masked_fill(~self.known, 0)
        return total.scatter_add(-1, self.origin.clamp(min=0), known)
