"""How much signal a pooling head keeps: the AdaPool paper's theory, on tensors.

A set has N tokens that are there, of which k are signal and the others noise. Masks
follow the package: ``signal`` is True for signal, ``padding`` True where no token is.
All is computed in float64. Where a set has no signal, or no noise, what depends on it
is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""By how much rounding may put a weight outside its bounds."""


class Neighborhoods(NamedTuple):
    """Where the relation scores of signal and of noise lie, each ``(*B,)`` float64.

    Source: the AdaPool paper, equations 8 and 9.
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
    """M = min r_s - max r_η, negative where they overlap; NaN for k = 0 or N."""
    distance: Tensor
    """D = max r_s - min r_η = M + ε_s + ε_η; NaN for k = 0 or N."""


class Bounds(NamedTuple):
    """Bounds of w* - w, the optimal minus the real weight, each ``(*B,)``.

    The optimal weight w* is 1/k for signal and 0 for noise. Bounds of a weight in
    [0, 1] that are 1 apart say nothing.
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
    """Number, mean and spread of the vectors of each set."""

    num_tokens: Tensor
    """``(B,)``: N."""
    mean: Tensor
    """``(B, D)``; zero for an empty set."""
    squares: Tensor
    """``(B,)``: sum of the squared distances from the mean."""


def neighborhoods(
    scores: Tensor, signal: Tensor, padding: Tensor | None = None
) -> Neighborhoods:
    """Measure the neighborhoods of relation scores.

    Args:
        scores: ``(*B, N)``, the softmax's arguments: scaled, of one head. What they
            are under padding does not matter.
        signal: ``(*B, N)`` bool, or of a shape that broadcasts to it.
        padding: the same, True = ignore; None where nothing is padded.
    """
    of_signal, of_noise = _split(scores, signal, padding)
    num_signal = of_signal.sum(-1).double()
    num_tokens = num_signal + of_noise.sum(-1)
    low_signal, high_signal = _extremes(scores, of_signal)
    low_noise, high_noise = _extremes(scores, of_noise)
    return Neighborhoods(
        num_signal,
        num_tokens,
        high_signal - low_signal,
        high_noise - low_noise,
        low_signal - high_noise,
        high_signal - low_noise,
    )


def weight_bounds(found: Neighborhoods) -> Bounds:
    """Bound how far the softmax's weights are from the signal-optimal ones.

    Source: the AdaPool paper, Theorem 3.12, as printed. It holds for M < 0 too. (The
    prose of its proof, A.5, calls -ε_s a bound on the distance of two *noise* scores
    and ε_s the largest one; the formulas have ε_η there, which is right.) A set
    without noise has no M and no D, nor has one without signal: the terms that count
    what is not there are dropped.

    Args:
        found: of `neighborhoods`.
    """
    k, n, signal_width, noise_width, margin, distance = found
    return Bounds(
        1 / k - 1 / (1 + (k - 1) * (-signal_width).exp() + _times(n - k, -distance)),
        1 / k - 1 / (1 + (k - 1) * signal_width.exp() + _times(n - k, -margin)),
        -1 / (_times(k, margin) + 1 + (n - k - 1) * (-noise_width).exp()),
        -1 / (_times(k, distance) + 1 + (n - k - 1) * noise_width.exp()),
    )


def outside(
    weights: Tensor,
    signal: Tensor,
    bounds: Bounds,
    padding: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Find the weights that are not within their bounds.

    Args:
        weights: ``(*B, N)`` of one head.
        signal: ``(*B, N)`` bool, or of a shape that broadcasts to it.
        bounds: of `weight_bounds`.
        padding: the same, True = ignore; None where nothing is padded.
        tolerance: by how much they may be out.

    Returns:
        ``(*B, N)`` bool, False under padding. A NaN is outside.
    """
    of_signal, of_noise = _split(weights, signal, padding)
    optimal = of_signal.double() / of_signal.sum(-1, keepdim=True).clamp(min=1)
    error = optimal - weights.double()
    low, high = (
        torch.where(of_signal, of_a_signal[..., None], of_a_noise[..., None])
        for of_a_signal, of_a_noise in (
            (bounds.signal_low, bounds.noise_low),
            (bounds.signal_high, bounds.noise_high),
        )
    )
    within = (low - tolerance <= error) & (error <= high + tolerance)
    return ~within & (of_signal | of_noise)


def pool(x: Tensor, weights: Tensor) -> Tensor:
    """Σ_i w_i ⊙ x_i, each head weighing its own part of the vectors.

    Source: the AdaPool paper, Definition 3.1 and, for several heads, B.2: attention
    with the identity for W_V and W_O, and without a residual.

    Args:
        x: ``(B, N, D)``, zero under padding.
        weights: ``(B, heads, N)``, where ``heads`` divides D.

    Returns:
        ``(B, D)``.
    """
    parts = x.unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
    return (weights[:, :, None] @ parts).flatten(1)


def max_weights(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The weights with which `pool` gives the maximum of each feature.

    Source: the AdaPool paper, equation 5: 1 for the largest of a feature, 1/m for m
    of them, and 0 for the others. Each feature is a head of its own, as in A.7.

    Args:
        x: ``(B, N, D)``.
        padding: ``(B, N)`` bool, True = ignore; None where nothing is padded.

    Returns:
        ``(B, D, N)``.
    """
    features = x.mT
    if padding is not None:
        features = features.masked_fill(padding[:, None], -torch.inf)
    largest = (features == features.amax(-1, keepdim=True)) & (features > -torch.inf)
    shares = largest.to(x.dtype)
    return shares / shares.sum(-1, keepdim=True).clamp(min=1)


def signal_loss(x: Tensor, pooled: Tensor, signal: Tensor, heads: int = 1) -> Tensor:
    """Mean squared error between the pooled vector and the signal vectors.

    Source: the AdaPool paper, Definition 3.2, with the mean over features. It is the
    spread of the signal around its own mean, which no pooled vector can avoid
    (Corollary 3.3), plus `excess_loss`.

    Args:
        x: ``(B, N, D)``.
        pooled: ``(B, D)``, x_c.
        signal: ``(B, N)`` bool, False under padding.
        heads: into how many parts, of equal width, the features are divided.

    Returns:
        ``(B, heads)``; NaN without signal.
    """
    errors = (x.double() - pooled.double()[:, None]).square()
    return _by_head(_mean(errors, signal), heads)


def excess_loss(x: Tensor, pooled: Tensor, signal: Tensor, heads: int = 1) -> Tensor:
    """How far the pooled vector is from the mean of the signal: ‖x_c - mean(X_s)‖²/d.

    This is what the paper's Table 3 prints as signal loss, and 0 for the signal-optimal
    pool. Arguments and result as of `signal_loss`.
    """
    best = _mean(x.double(), signal)
    return _by_head((pooled.double() - best).square(), heads)


def transitions(x: Tensor, padding: Tensor | None = None) -> Moments:
    """Number, mean and spread of the vectors ``(B, N, D)`` of each set."""
    present = torch.ones_like(x[..., 0], dtype=torch.bool)
    if padding is not None:
        present = ~padding
    mean = _mean(x.double(), present).nan_to_num(0.0)
    away = (x.double() - mean[:, None]).square().sum(-1)
    return Moments(
        present.sum(-1).double(), mean, away.masked_fill(~present, 0.0).sum(-1)
    )


def variance(found: Moments) -> tuple[Tensor, Tensor]:
    """The variance of a feature of the vectors of all sets, on average over features.

    Args:
        found: of `moments`.

    Returns:
        It, and which share of it is within the sets; the rest is between their means.
    """
    count, mean, squares = found
    common = (count[:, None] * mean).sum(0) / count.sum()
    within = squares.sum()
    total = within + (count * (mean - common).square().sum(-1)).sum()
    return total / (count.sum() * mean.shape[-1]), within / total


def _split(
    scores: Tensor, signal: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which tokens are signal and which are noise, in the shape of ``scores``."""
    present = torch.ones_like(scores, dtype=torch.bool)
    if padding is not None:
        present = present & ~padding
    return present & signal, present & ~signal


def _extremes(scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of the chosen scores; NaN where none is."""
    numbers, none = scores.double(), ~chosen.any(-1)
    low = numbers.masked_fill(~chosen, torch.inf).amin(-1)
    high = numbers.masked_fill(~chosen, -torch.inf).amax(-1)
    return low.masked_fill(none, torch.nan), high.masked_fill(none, torch.nan)


def _times(count: Tensor, exponent: Tensor) -> Tensor:
    """Count · e^exponent, and 0 for none, whose exponent is undefined."""
    return torch.where(count > 0, count * exponent.exp(), 0.0)


def _mean(x: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen of N vectors, ``(B, D)``; NaN where none is."""
    total = x.masked_fill(~chosen[..., None], 0.0).sum(-2)
    return total / chosen.sum(-1, keepdim=True)


def _by_head(features: Tensor, heads: int) -> Tensor:
    return features.unflatten(-1, (heads, -1)).mean(-1)
