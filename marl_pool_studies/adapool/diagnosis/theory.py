"""Signal-to-noise theory of pooling heads, from the AdaPool paper, on tensors.

Source: Brothers (2025), https://arxiv.org/abs/2506.09215.

A set has N present tokens, of which k are signal and N - k are noise. Masks follow the
package: ``signal`` is True for signal tokens, ``padding`` True for absent ones. All
computation is in float64. Quantities that depend on the signal are NaN for k = 0, those
that depend on the noise are NaN for k = N.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest rounding error of a weight relative to its bounds."""


class Neighborhoods(NamedTuple):
    """Ranges of the relation scores of signal and noise, each ``(*B,)`` float64.

    Source: equations 8 and 9.
    """

    num_signal: Tensor
    """k."""
    num_tokens: Tensor
    """N."""
    signal_width: Tensor
    """ε_s = max r_s - min r_s; NaN for k = 0."""
    noise_width: Tensor
    """ε_η = max r_η - min r_η; NaN for k = N."""
    margin: Tensor
    """M = min r_s - max r_η, negative if the ranges overlap; NaN for k = 0 or N."""
    distance: Tensor
    """D = max r_s - min r_η = M + ε_s + ε_η; NaN for k = 0 or N."""


class WeightBounds(NamedTuple):
    """Bounds of w* - w, the optimal minus the actual attention weight, each ``(*B,)``.

    The optimal weight w* is 1/k for signal and 0 for noise. Weights lie in [0, 1], so
    bounds with a distance of 1 or more are vacuous.
    """

    signal_low: Tensor
    """L_s; NaN for k = 0."""
    signal_high: Tensor
    """U_s; NaN for k = 0."""
    noise_low: Tensor
    """L_η; NaN for k = N."""
    noise_high: Tensor
    """U_η; NaN for k = N."""


class Moments(NamedTuple):
    """Count, mean and spread of the vectors of each set."""

    num_tokens: Tensor
    """``(B,)``: N."""
    mean: Tensor
    """``(B, D)``; zero for an empty set."""
    squares: Tensor
    """``(B,)``: sum of squared distances from the mean."""


def neighborhoods(
    scores: Tensor, signal: Tensor, padding: Tensor | None = None
) -> Neighborhoods:
    """Measure the ranges of ``scores (*B, N)``, the logits of one head's softmax.

    ``signal`` and ``padding`` are broadcast to the scores; padded tokens are ignored.
    """
    is_signal, is_noise = _split(scores, signal, padding)
    num_signal = is_signal.sum(-1).double()
    num_tokens = num_signal + is_noise.sum(-1)
    low_signal, high_signal = _extremes(scores, is_signal)
    low_noise, high_noise = _extremes(scores, is_noise)
    return Neighborhoods(
        num_signal,
        num_tokens,
        high_signal - low_signal,
        high_noise - low_noise,
        low_signal - high_noise,
        high_signal - low_noise,
    )


def weight_bounds(ranges: Neighborhoods) -> WeightBounds:
    """Bound the distance of softmax weights from the signal-optimal weights.

    For signal (w* = 1/k)

        L_s = 1/k - 1/(1 + (k-1) e^-ε_s + (N-k) e^-D)
        U_s = 1/k - 1/(1 + (k-1) e^ε_s + (N-k) e^-M)

    and for noise (w* = 0)

        L_η = -1/(k e^M + 1 + (N-k-1) e^-ε_η)
        U_η = -1/(k e^D + 1 + (N-k-1) e^ε_η)

    Source: Theorem 3.12 as printed, which also holds for M < 0. (The prose of its
    proof, A.5, writes ε_s for ε_η in the noise case; the printed formulas are right.)
    M and D are undefined for k = 0 and k = N; their terms have a count of 0 there and
    are dropped.
    """
    k, n, signal_width, noise_width, margin, distance = ranges
    return WeightBounds(
        1 / k - 1 / (1 + (k - 1) * (-signal_width).exp() + _times(n - k, -distance)),
        1 / k - 1 / (1 + (k - 1) * signal_width.exp() + _times(n - k, -margin)),
        -1 / (_times(k, margin) + 1 + (n - k - 1) * (-noise_width).exp()),
        -1 / (_times(k, distance) + 1 + (n - k - 1) * noise_width.exp()),
    )


def outside(
    weights: Tensor, signal: Tensor, bounds: WeightBounds, padding: Tensor | None = None
) -> Tensor:
    """Mark the weights of one head that are further than `TOLERANCE` outside bounds.

    Weights and result are ``(*B, N)``, to which the masks are broadcast. The result is
    False for padded tokens and True for NaN.
    """
    # The optimal weight is 1/k for signal and 0 for noise.
    is_signal, is_noise = _split(weights, signal, padding)
    optimal = is_signal.double() / is_signal.sum(-1, keepdim=True).clamp(min=1)
    error = optimal - weights.double()
    signal_low, signal_high, noise_low, noise_high = (b[..., None] for b in bounds)
    low = torch.where(is_signal, signal_low, noise_low)
    high = torch.where(is_signal, signal_high, noise_high)
    # NaN compares as False, and counts as outside.
    within = (low - TOLERANCE <= error) & (error <= high + TOLERANCE)
    return ~within & (is_signal | is_noise)


def pool(x: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum Σ_i w_i ⊙ x_i; head h weights the h-th part of the features.

    Source: Definition 3.1 and, for several heads, B.2: attention with W_V = W_O = I
    and without a residual connection.

    ``x (B, N, D)`` is zero for padded tokens, ``weights`` are ``(B, heads, N)``, where
    ``heads`` divides D, and the result is ``(B, D)``.
    """
    # (B, heads, N, D / heads).
    parts = x.unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
    return (weights[:, :, None] @ parts).flatten(1)


def max_weights(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """Weights ``(B, D, N)`` with which `pool` returns the maximum of ``x (B, N, D)``.

    They are 1/m for the m tokens that share a feature's maximum and 0 for the others;
    each feature is a head, as in A.7.

    Source: equation 5.
    """
    features = x.mT
    if padding is not None:
        features = features.masked_fill(padding[:, None], -torch.inf)
    largest = (features == features.amax(-1, keepdim=True)) & (features > -torch.inf)
    weights = largest.to(x.dtype)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1)


def signal_loss(x: Tensor, pooled: Tensor, signal: Tensor, heads: int = 1) -> Tensor:
    """Mean squared error between the pooled vector and the signal vectors.

    It is the sum of the signal's variance around its own mean, a lower bound for any
    pooled vector (Corollary 3.3), and of `excess_loss`.

    Source: Definition 3.2, averaged over features.

    Args:
        x: ``(B, N, D)``.
        pooled: ``(B, D)``, x_c.
        signal: ``(B, N)`` bool, False for padded tokens.
        heads: number of equal parts of the features, averaged separately.

    Returns:
        ``(B, heads)``; NaN without signal.
    """
    errors = (x.double() - pooled.double()[:, None]).square()
    return _mean(errors, signal).unflatten(-1, (heads, -1)).mean(-1)


def excess_loss(x: Tensor, pooled: Tensor, signal: Tensor, heads: int = 1) -> Tensor:
    """Distance of the pooled vector from the signal's mean, ‖x_c - mean(X_s)‖²/d.

    It is 0 for signal-optimal weights, and is printed as signal loss in the paper's
    Table 3. Arguments and result are as in `signal_loss`.
    """
    errors = (pooled.double() - _mean(x.double(), signal)).square()
    return errors.unflatten(-1, (heads, -1)).mean(-1)


def moments(x: Tensor, padding: Tensor | None = None) -> Moments:
    """Count, mean and spread of the vectors ``(B, N, D)`` of each set."""
    present = _present(x[..., 0], padding)
    mean = _mean(x.double(), present).nan_to_num(0.0)
    squares = (x.double() - mean[:, None]).square().sum(-1).masked_fill(~present, 0.0)
    return Moments(present.sum(-1).double(), mean, squares.sum(-1))


def variance(sets: Moments) -> tuple[Tensor, Tensor]:
    """Variance of the vectors of all sets, averaged over features.

    Returns:
        The variance, and its fraction within the sets; the rest is between their means.
    """
    count, mean, squares = sets
    # Law of total variance: squares within sets plus squares of the sets' means.
    common = (count[:, None] * mean).sum(0) / count.sum()
    within = squares.sum()
    total = within + (count * (mean - common).square().sum(-1)).sum()
    return total / (count.sum() * mean.shape[-1]), within / total


def _split(
    scores: Tensor, signal: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Masks of the present signal and noise tokens, in the shape of ``scores``."""
    present = _present(scores, padding)
    return present & signal, present & ~signal


def _present(scores: Tensor, padding: Tensor | None) -> Tensor:
    present = torch.ones_like(scores, dtype=torch.bool)
    return present if padding is None else present & ~padding


def _extremes(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of the masked-in scores; NaN for an empty mask."""
    scores, empty = scores.double(), ~mask.any(-1)
    low = scores.masked_fill(~mask, torch.inf).amin(-1)
    high = scores.masked_fill(~mask, -torch.inf).amax(-1)
    return low.masked_fill(empty, torch.nan), high.masked_fill(empty, torch.nan)


def _times(count: Tensor, exponent: Tensor) -> Tensor:
    """Product count · e^exponent; 0 for count 0, whose exponent may be NaN."""
    return torch.where(count > 0, count * exponent.exp(), 0.0)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked-in vectors, ``(B, D)``; NaN for an empty mask."""
    total = x.masked_fill(~mask[..., None], 0.0).sum(-2)
    return total / mask.sum(-1, keepdim=True)
