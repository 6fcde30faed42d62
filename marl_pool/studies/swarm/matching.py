"""Assignment of outputs to clusters, and its likelihood."""

from typing import NamedTuple

import torch
from torch import Tensor


class Matched(NamedTuple):
    """Outputs matched to clusters.

    Attributes:
        outputs: ``(B, C)`` int64, the output that each cluster was given; -1 for a
            cluster that is not there.
        losses: ``(B,)`` mean negative log-likelihood of a set's entities under the
            match, with a gradient.
    """

    outputs: Tensor
    losses: Tensor


def match_clusters(
    log_probs: Tensor, labels: Tensor, padding: Tensor, num_clusters: Tensor
) -> Matched:
    """Give each cluster an output of its own, so that the likelihood is greatest.

    ``min over π of -1/N Σ_i log p_i(π(label_i))``, where π takes clusters to different
    outputs. Of K outputs K - C stay unused: a rectangular assignment problem on
    ``-Σ_{i in c} log p_i(k)``. The gradient goes through the matched terms; where the
    best assignment changes, the loss has a kink.

    Source: SWARM (Vollgraf, 2019), section 4.1, by the Hungarian algorithm (Kuhn,
    1955), here scipy's `linear_sum_assignment`.

    Args:
        log_probs: ``(B, N, K)``, each entity's, finite also under padding.
        labels: ``(B, N)`` int64 in [0, C).
        padding: ``(B, N)`` bool, True = ignore.
        num_clusters: ``(B,)``, how many clusters each set has, at most K.
    """
    scores = cluster_scores(log_probs, labels, padding)
    outputs = _assign(scores.detach(), num_clusters)
    taken = scores.gather(2, outputs.clamp(min=0)[..., None])[..., 0]
    total = taken.masked_fill(outputs < 0, 0.0).sum(1)
    return Matched(outputs, -total / (~padding).sum(1).clamp(min=1))


def cluster_scores(log_probs: Tensor, labels: Tensor, padding: Tensor) -> Tensor:
    """Return ``Σ_{i in c} log p_i(k)``, ``(B, K, K)``: a row a cluster; see above."""
    outputs = log_probs.shape[-1]
    own = log_probs.masked_fill(padding[..., None], 0.0)
    scores = own.new_zeros(len(own), outputs, outputs)
    return scores.scatter_add(1, labels[..., None].expand_as(own), own)


def accuracy(
    log_probs: Tensor, labels: Tensor, padding: Tensor, outputs: Tensor
) -> Tensor:
    """Share of entities whose likeliest output is their cluster's, ``(B,)``.

    Args:
        log_probs: as for `match_clusters`.
        labels: likewise.
        padding: likewise.
        outputs: of `match_clusters`.
    """
    right = (log_probs.argmax(-1) == outputs.gather(1, labels)) & ~padding
    return right.sum(1) / (~padding).sum(1).clamp(min=1)


def _assign(scores: Tensor, num_clusters: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    # What is no number stays one in the loss, where the run is stopped for it.
    table = scores.double().nan_to_num().cpu().numpy()
    outputs = torch.full(scores.shape[:2], -1)
    for row, count in enumerate(num_clusters.tolist()):
        _, best = linear_sum_assignment(-table[row, :count])
        outputs[row, :count] = torch.from_numpy(best)
    return outputs.to(scores.device)
