"""Choosing and permuting a share of a row's slots by random scores."""

import torch
from torch import Tensor


def lowest(scores: Tensor, eligible: Tensor, share: float) -> Tensor:
    """Choose ``round(share * n)`` of each row's n eligible slots.

    Halves round to even. With the same scores, a larger share chooses the same slots
    and some more.

    Args:
        scores: ``(*B, N)``, without ties; the lowest are chosen.
        eligible: ``(*B, N)`` bool.
        share: in [0, 1].

    Returns:
        ``(*B, N)`` bool.
    """
    ranks = scores.masked_fill(~eligible, torch.inf).argsort(-1).argsort(-1)
    count = (eligible.sum(-1, keepdim=True).double() * share).round()
    return ranks < count


def permutation(scores: Tensor, taking_part: Tensor) -> Tensor:
    """Permute the slots that take part among themselves; the others stay.

    For scores that are exchangeable, all permutations are equally likely, the
    identity too.

    Args:
        scores: ``(*B, N)``, without ties.
        taking_part: ``(*B, N)`` bool.

    Returns:
        ``(*B, N)`` int64: for each slot, the one whose content comes to it.
    """
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
