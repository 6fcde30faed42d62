"""Selection among perceived tokens, and the entities behind them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class SelectedTokens:
    """A `Selection` among perceived tokens, whatever their number and order.

    Args:
        spec: the tokens of an observation.
        actions: an action space that selects tokens.

    Raises:
        InputError: types that the tokens lack, or another number of tokens.
    """

    spec: TokenSpec
    actions: ActionSpec

    def __post_init__(self) -> None:
        names, count = self.spec.type_names, self.actions.n - self.actions.num_fixed
        for name in self.actions.selects:
            if name not in names:
                raise InputError(
                    f"Selection.selects: expected some of "
                    f"{', '.join(map(repr, names))}, got {name!r}"
                )
        if count != self.spec.num_tokens:
            raise InputError(
                f"Selection.num_tokens: expected {self.spec.num_tokens}, the number of "
                f"tokens of an observation, got {count}"
            )

    @cached_property
    def type_numbers(self) -> tuple[int, ...]:
        """Numbers of the types that can be selected."""
        return tuple(map(self.spec.type_names.index, self.actions.selects))

    def options(self, tokens: Tokens) -> Tensor:
        """Return the options of an agent that perceives these tokens.

        They are the fixed options and the present tokens of selectable types, as far as
        the action mask allows them. If it allows none, all fixed options remain.

        Args:
            tokens: of batch ``(*B,)``; their action mask is ``(*B, num_fixed + N)``.

        Returns:
            ``(*B, num_fixed + N)`` bool.
        """
        kinds = constant(self.type_numbers, tokens.types.device)
        is_kind = (tokens.types[..., None] == kinds).any(-1)
        present = is_kind & ~tokens.padding
        shape = (*present.shape[:-1], self.actions.num_fixed)
        fixed = torch.ones_like(present[..., :1]).expand(shape)
        options = torch.cat([fixed, present], -1)
        if (mask := self.actions.mask_of(tokens)) is None:
            return options
        allowed = options & mask
        fixed_only = torch.cat([fixed, torch.zeros_like(present)], -1)
        # ONNX has no `where` of bools.
        return allowed | (fixed_only & ~allowed.any(-1, keepdim=True))

    def perceive(self, perceived: Tokens, origin: Tensor) -> Tokens:
        """Return perceived tokens with the action mask of their slots.

        A token that the environment lacks can be selected: the agent cannot tell.

        Args:
            perceived: M tokens of batch ``(*B,)``, with the environment's mask
                ``(*B, num_fixed + N)``.
            origin: ``(*B, M)`` int64, the environment's token behind each one, -1 for
                none.
        """
        mask, fixed = perceived.action_mask, self.actions.num_fixed
        assert mask is not None
        by_slot = mask[..., fixed:].gather(-1, origin.clamp(min=0)) | (origin < 0)
        moved = torch.cat([mask[..., :fixed], by_slot], -1)
        moved_tokens = perceived._replace(action_mask=moved)
        return perceived._replace(action_mask=self.options(moved_tokens))

    def execute(self, choice: Tensor, origin: Tensor, perceived: Tokens) -> Tensor:
        """Return the environment's options for what agents chose from their perception.

        An agent that selects a token that the environment lacks takes the first fixed
        option that is allowed, or the first if none is.

        Args:
            choice: ``(*B,)`` int64, options of the perceived tokens.
            origin: as in `perceive`.
            perceived: the perceived tokens.

        Returns:
            ``(*B,)`` int64.
        """
        mask, fixed = perceived.action_mask, self.actions.num_fixed
        slot = (choice - fixed).clamp(min=0)
        source = origin.gather(-1, slot[..., None])[..., 0]
        nothing = torch.zeros_like(choice)
        if mask is not None:
            nothing = mask[..., :fixed].byte().argmax(-1).to(choice.dtype)
        selected = torch.where(source < 0, nothing, fixed + source)
        return torch.where(choice < fixed, choice, selected)
