"""Selecting, permuting and appending slots of a row."""

import torch
from torch import Tensor

from marl_pool.tokens import Tokens


def lowest(scores: Tensor, eligible: Tensor, share: float | Tensor) -> Tensor:
    """Select ``round(share * n)`` of each row's n eligible slots, ``(*B, N)`` bool.

    Args:
        scores: ``(*B, N)``, finite and without ties; the lowest are selected.
        eligible: ``(*B, N)`` bool.
        share: in [0, 1]; or ``(*B', 1, …)`` float64, one for each leading index.
    """
    # Find each row's threshold, the score of the last slot to select.
    queue = scores.masked_fill(~eligible, torch.inf)
    count = counted(eligible, share)
    last = queue.sort(-1).values.gather(-1, (count - 1).clamp(min=0))
    return (queue <= last) & (count > 0) & eligible


def counted(eligible: Tensor, share: float | Tensor) -> Tensor:
    """Count ``round(share * n)`` of each row's n eligible slots, ``(*B, 1)`` int64."""
    return (eligible.sum(-1, keepdim=True).double() * share).round().long()


def permutation(scores: Tensor, taking_part: Tensor) -> Tensor:
    """Permute the slots that take part; the others stay.

    Args:
        scores: ``(*B, N)``, without ties; random ones make all permutations as likely.
        taking_part: ``(*B, N)`` bool.

    Returns:
        ``(*B, N)`` int64: for each slot, the index of the slot whose content it gets.
    """
    # The slots that take part, in the order of their scores and of their places: the
    # slot at a place gets the content of the one at the same rank by score.
    by_score = scores.masked_fill(~taking_part, torch.inf).argsort(-1)
    by_place = (~taking_part).byte().argsort(dim=-1, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    moved = places < taking_part.sum(-1, keepdim=True)
    source = torch.where(moved, by_score, by_place)
    return torch.empty_like(source).scatter_(-1, by_place, source)


def take_features(features: Tensor, origin: Tensor) -> Tensor:
    """Reorder tokens' features ``(*B, N, F)`` by ``origin`` ``(*B, M)``."""
    return features.gather(
        -2, origin[..., None].expand(*origin.shape, features.shape[-1])
    )


def append(tokens: Tokens, added: Tokens) -> Tokens:
    """Append the slots of ``added`` to those of ``tokens``."""
    return Tokens(*map(torch.cat, zip(tokens, added, strict=True), (-2, -1, -1)))


def identity_origin(tokens: Tokens) -> Tensor:
    """Return the ``origin`` of unmoved tokens, ``(num_envs, agents, N)`` int64."""
    places = torch.arange(tokens.num_tokens, device=tokens.types.device)
    return places.expand_as(tokens.types)
