"""Which tokens an agent can select, and which entity it has selected."""

import torch
from torch import Tensor

from marl_pool.policies.actions import ActionSpec
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError


def type_numbers(spec: TokenSpec, actions: ActionSpec) -> tuple[int, ...]:
    """Return the numbers of the types that can be selected.

    Raises:
        InputError: a type that the tokens lack, or another number of tokens.
    """
    for name in actions.selects:
        if name not in spec.type_names:
            raise InputError(
                f"Selection.selects: expected some of {', '.join(spec.type_names)}, "
                f"got {name}"
            )
    if actions.n - actions.num_fixed != spec.num_tokens:
        raise InputError(
            f"Selection.num_tokens: expected {spec.num_tokens}, the number of tokens "
            f"of an observation, got {actions.n - actions.num_fixed}"
        )
    return tuple(map(spec.type_names.index, actions.selects))


def selectable(tokens: Tokens, numbers: tuple[int, ...], num_fixed: int) -> Tensor:
    """Return the options of an agent that perceives these tokens, bool.

    They are the fixed options, and the tokens of the types ``numbers`` that are not
    padded, where the action mask allows them. If it allows none of these, all fixed
    options remain.

    Args:
        tokens: of batch ``(*B,)``; their action mask is ``(*B, num_fixed + N)``.
        numbers: see `type_numbers`.
        num_fixed: number of fixed options.

    Returns:
        ``(*B, num_fixed + N)`` bool.
    """
    kinds = constant(numbers, tokens.types.device)
    is_kind = (tokens.types[..., None] == kinds).any(-1)
    present = is_kind & ~tokens.padding
    fixed = torch.ones_like(present[..., :1]).expand(*present.shape[:-1], num_fixed)
    options = torch.cat([fixed, present], -1)
    if tokens.action_mask is None:
        return options
    allowed = options & tokens.action_mask
    rest = torch.cat([fixed, torch.zeros_like(present)], -1)
    return torch.where(allowed.any(-1, keepdim=True), allowed, rest)


def perceived_mask(mask: Tensor, origin: Tensor, num_fixed: int) -> Tensor:
    """Arrange an environment's action mask by the slots that an agent perceives.

    Args:
        mask: ``(*B, num_fixed + N)`` bool.
        origin: ``(*B, M)`` int64, the environment's token behind each one perceived, -1
            for none. One that the environment lacks can be selected: the agent does
            not know.
        num_fixed: number of fixed options.

    Returns:
        ``(*B, num_fixed + M)`` bool.
    """
    by_slot = mask[..., num_fixed:].gather(-1, origin.clamp(min=0)) | (origin < 0)
    return torch.cat([mask[..., :num_fixed], by_slot], -1)


def selected_entity(
    choice: Tensor, origin: Tensor, num_fixed: int, mask: Tensor | None
) -> Tensor:
    """Return the environment's options for what agents selected from their perception.

    Args:
        choice: ``(*B,)`` int64, options of the perceived tokens.
        origin: as in `perceived_mask`.
        num_fixed: number of fixed options.
        mask: ``(*B, ≥ num_fixed)`` bool, the action mask, or None to allow all. Who
            selects a token that the environment lacks takes the first fixed option
            that is allowed, or the first.

    Returns:
        ``(*B,)`` int64.
    """
    slot = (choice - num_fixed).clamp(min=0)
    source = origin.gather(-1, slot[..., None])[..., 0]
    nothing = torch.zeros_like(choice)
    if mask is not None:
        nothing = mask[..., :num_fixed].byte().argmax(-1).to(choice.dtype)
    selected = torch.where(source < 0, nothing, num_fixed + source)
    return torch.where(choice < num_fixed, choice, selected)
