"""Choice of pairs of tokens without replacement, and its probability."""

from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.kernels.functional import is_transformed
from marl_pool.tokens import Mask
from marl_pool.utils.devices import may_read

LOWEST = -1e30
"""Logit of an impossible choice; finite, so that no gradient is NaN."""


class Pairs(NamedTuple):
    """Ordered pairs without a common token, in the order in which they were chosen."""

    gone: Tensor
    """``(B, R)`` int64, token i of each pair, which merges into token j."""
    kept: Tensor
    """``(B, R)`` int64, token j of each pair."""
    valid: Tensor
    """``(B, R)`` bool, False after a row's last pair."""


def gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Sample Gumbel noise in the shape of ``like``.

    The argmax of logits plus noise is a sample from their softmax. Among any subset of
    the logits, it is a sample from the softmax of that subset, so noise sampled once
    serves a whole sequence of choices.
    """
    noise = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    noise.exponential_(generator=generator).clamp_(min=torch.finfo(like.dtype).tiny)
    return -noise.log_().to(like.device)


@torch.no_grad()
def choose_pairs(
    scores: Tensor, most: int, counts: Tensor | None = None, padding: Mask = None
) -> Pairs:
    """Choose the ordered pair of highest score, then the next of two other tokens, ….

    Logits as scores are greedy; with `gumbel` noise they sample without replacement.

    Args:
        scores: ``(B, T, T)``; entry (i, j) is token i merging into token j.
        most: R, at most T // 2.
        counts: ``(B,)``, pairs of each row, at most ``most``; None for ``most``.
        padding: ``(B, T)`` bool, True = no token; None where nothing is padded.
    """
    partner, strength = _matching(scores, padding)
    best, kept = strength.topk(most, dim=1)
    # `topk` fills up with tokens that keep no partner.
    valid = best > -torch.inf
    if counts is not None:
        valid &= torch.arange(most, device=scores.device) < counts[:, None]
    return Pairs(partner.gather(1, kept), kept, valid)


def _matching(scores: Tensor, padding: Mask) -> tuple[Tensor, Tensor]:
    """Return each token's partner, and the score of its pair at the kept token.

    The greedy order reaches a pair that is the best of both its tokens before any
    other pair of either. So each round chooses all such pairs at once, and about log T
    rounds suffice.
    """
    # A token cannot be merged with itself, nor with padding.
    size = scores.shape[1]
    places = torch.arange(size, device=scores.device)
    never = torch.eye(size, dtype=torch.bool, device=scores.device)
    if padding is not None:
        never = never | padding[:, :, None] | padding[:, None, :]
    scores = scores.masked_fill(never, -torch.inf)
    # Both orders of a pair compete.
    either = torch.maximum(scores, scores.transpose(1, 2))
    partner = places.expand(scores.shape[0], size)
    strength = torch.full_like(scores[:, 0], -torch.inf)
    for _ in range(size // 2):  # each round chooses at least one pair
        best, mate = either.max(2)
        # Tokens that are the best partners of each other.
        mutual = (mate.gather(1, mate) == places) & (best > -torch.inf)
        may_test = not is_transformed() and may_read(mutual)
        if may_test and not mutual.any():
            break
        # The better order decides which token is kept.
        going = scores.gather(2, mate[..., None])[..., 0]
        coming = scores.transpose(1, 2).gather(2, mate[..., None])[..., 0]
        kept = mutual & ((coming > going) | ((coming == going) & (mate < places)))
        partner = torch.where(mutual, mate, partner)
        strength = torch.where(kept, best, strength)
        either.masked_fill_(mutual[:, :, None] | mutual[:, None, :], -torch.inf)
    return partner, strength


def pair_log_prob(
    logits: Tensor, pairs: Pairs, padding: Mask = None, *, masked: bool = True
) -> Tensor:
    """Return the log-probability ``(B, R)`` of each pair when chosen; 0 if not valid.

    Masked: by the softmax over all ordered pairs of remaining tokens; the sum is the
    log-probability of the sequence. Unmasked: by the softmax over the whole matrix, its
    diagonal included, as in Nair and Lieck, *Hierarchical Transformers*, sections 3.1.2
    and 3.1.5; that is not the log-probability of the sample.

    Args:
        logits: ``(B, T, T)``.
        pairs: the chosen pairs.
        padding: ``(B, T)`` bool, or None.
        masked: renormalize over the tokens that remain at each choice.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    chosen_logits = logits[rows, pairs.gone, pairs.kept]
    if padding is not None:
        absent = padding[:, :, None] | padding[:, None, :]
        logits = logits.masked_fill(absent, LOWEST)
    if masked:
        total = _remaining(logits, pairs)
    else:
        total = logits.flatten(1).logsumexp(1, keepdim=True)
    return (chosen_logits - total).masked_fill(~pairs.valid, 0.0)


def _remaining(logits: Tensor, pairs: Pairs) -> Tensor:
    """Return the log-sum-exp over the pairs allowed at each choice, ``(B, R)``.

    With tokens sorted by the time of their choice, a pair is allowed until its first
    token is chosen, so these are cumulative sums from the end.
    """
    size, count = logits.shape[1], pairs.gone.shape[1]
    # The choice that uses each token; ``size`` for none.
    turn = torch.arange(count, device=logits.device).expand_as(pairs.gone)
    turn = turn.masked_fill(~pairs.valid, size).repeat(1, 2)
    used = torch.full_like(logits[:, 0], size, dtype=torch.int64)
    used = used.scatter_reduce(1, torch.cat(pairs[:2], 1), turn, "amin")
    # Sort tokens by it, and sum over pairs, beginning with the tokens used last.
    order = used.argsort(dim=1, stable=True)
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None, None]
    sorted_ = logits[rows, order[:, :, None], order[:, None, :]]
    symmetric = torch.logaddexp(sorted_, sorted_.transpose(1, 2))
    later = torch.ones(size, size, dtype=torch.bool, device=logits.device).triu(1)
    by_first = symmetric.masked_fill(~later, LOWEST).logsumexp(2)
    # Each choice uses two tokens, so every second sum is one at a choice.
    return by_first.flip(1).logcumsumexp(1).flip(1)[:, : 2 * count : 2]


@torch.no_grad()
def choose_tokens(scores: Tensor, count: int) -> Tensor:
    """Choose the ``count`` tokens of highest score ``(B, S)``, best first."""
    return scores.topk(count, dim=1).indices


def token_log_prob(logits: Tensor, choices: Tensor, *, masked: bool = True) -> Tensor:
    """Return the log-probability ``(B, R)`` of tokens in the order of their choice.

    With ``masked``, it is renormalized over the tokens that remain at each choice.
    """
    chosen_logits = logits.gather(1, choices)
    if not masked:
        return chosen_logits - logits.logsumexp(1, keepdim=True)
    unchosen = logits.scatter(1, choices, LOWEST).logsumexp(1, keepdim=True)
    remaining = torch.cat([chosen_logits, unchosen], 1).flip(1).logcumsumexp(1).flip(1)
    return chosen_logits - remaining[:, :-1]


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of ``x (B, T, D)`` at ``index (B, R)``, ``(B, R, D)``."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
