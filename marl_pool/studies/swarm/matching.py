"""Matching of outputs to clusters: the best assignment, and its likelihood."""

from typing import NamedTuple

import torch
from torch import Tensor


class Matched(NamedTuple):
    """Outputs matched to clusters."""

    outputs: Tensor
    """``(B, C)`` int64, output of each cluster; -1 for an absent cluster."""
    losses: Tensor
    """``(B,)``, mean negative log-likelihood of a set's entities under the match, with
    a gradient."""


def match_clusters(
    log_probs: Tensor, labels: Tensor, padding: Tensor, num_clusters: Tensor
) -> Matched:
    r"""Assign a distinct output to each cluster, with the greatest likelihood.

    .. math:: \min_\pi -\frac{1}{N} \sum_{i=1}^{N} \log p_i(\pi(c_i))

    over injective maps :math:`\pi` of the C clusters to the K outputs, with the label
    :math:`c_i` of entity i. It is a rectangular assignment problem with the costs
    :math:`-\sum_{i: c_i = c} \log p_i(k)`. The gradient is that of the matched terms;
    the loss has a kink where the best assignment changes.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.1, by
    the Hungarian algorithm (Kuhn, 1955), here scipy's `linear_sum_assignment`.

    Args:
        log_probs: ``(B, N, K)``, log-probabilities of each entity, finite also under
            padding.
        labels: ``(B, N)`` int64 in [0, C).
        padding: ``(B, N)`` bool, True = ignore.
        num_clusters: ``(B,)``, clusters of each set, at most K.
    """
    from scipy.optimize import linear_sum_assignment

    # Assign without a gradient, which passes through the scores. Replace NaN for scipy
    # only: in the loss it stays and stops the run.
    scores = cluster_scores(log_probs, labels, padding)
    table = scores.detach().double().nan_to_num().cpu().numpy()
    assigned = torch.full(scores.shape[:2], -1)
    for row, count in enumerate(num_clusters.tolist()):
        _, best = linear_sum_assignment(-table[row, :count])
        assigned[row, :count] = torch.from_numpy(best)
    outputs = assigned.to(scores.device)
    taken = scores.gather(2, outputs.clamp(min=0)[..., None])[..., 0]
    total = taken.masked_fill(outputs < 0, 0.0).sum(1)
    return Matched(outputs, -total / (~padding).sum(1).clamp(min=1))


def cluster_scores(log_probs: Tensor, labels: Tensor, padding: Tensor) -> Tensor:
    """Sum ``log p_i(k)`` over the entities of each cluster: ``(B, clusters, K)``.

    The number of rows is K, too; rows beyond the clusters are zero.
    """
    outputs = log_probs.shape[-1]
    own = log_probs.masked_fill(padding[..., None], 0.0)
    scores = own.new_zeros(len(own), outputs, outputs)
    return scores.scatter_add(1, labels[..., None].expand_as(own), own)


def accuracy(
    log_probs: Tensor, labels: Tensor, padding: Tensor, outputs: Tensor
) -> Tensor:
    """Compute the fraction of entities whose likeliest output is their cluster's.

    ``outputs`` are those of `match_clusters`, as are the other arguments. The result is
    ``(B,)``, in [0, 1].
    """
    right = (log_probs.argmax(-1) == outputs.gather(1, labels)) & ~padding
    return right.sum(1) / (~padding).sum(1).clamp(min=1)
