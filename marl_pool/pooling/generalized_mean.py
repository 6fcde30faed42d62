"""Means between the average and the maximum of each feature, with a learned place."""

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveFloat

EPS = 1e-6
"""Least share of the largest distance that a distance counts as, since 0 has no
gradient under a power; with ``shift=False`` also the least feature, as published."""


class PowerMeanPooling(Pooling):
    """Generalised mean (GeM) of each feature, above the smallest one.

    ``y = m + (1/N Σ_i (x_i - m)^p)^(1/p)`` with ``m = min_i x_i``; p = 1 is the
    average and p → ∞ the maximum.

    Source: Radenović, Tolias and Chum (2018), equation 3. Where we differ: theirs is
    for features that are not negative, ``shift=False``, and clamps others to a small
    number, so that at p = 1 it is an average of those alone. Counted from the smallest
    feature of the set, it lies between average and maximum for any features. For an
    empty set the result is zero.

    Args:
        dim: D, the width of the vectors.
        p: the exponent, at least 1; where it is learned, its initial value, above 1.
        learn: learn it, as ``1 + exp(·)``.
        shift: count from the smallest feature; otherwise from 0.

    Raises:
        InputError: an exponent below 1, or 1 to be learned.
    """

    fixed: Tensor

    def __init__(
        self,
        dim: int,
        *,
        p: PositiveFloat = 3.0,
        learn: bool = True,
        shift: bool = True,
    ) -> None:
        super().__init__(dim)
        if not p >= 1 or (learn and p == 1):
            least = "above 1 where it is learned" if learn else "at least 1"
            raise InputError(f"pooling.p: expected a number {least}, got {p}")
        self.shift = shift
        above = torch.tensor(p - 1.0).log() if learn else torch.tensor(p)
        if learn:
            self.log_above_one = nn.Parameter(above)
        else:
            self.register_buffer("fixed", above, persistent=False)
        self.learn = learn

    @property
    def p(self) -> Tensor:
        """The exponent."""
        return 1 + self.log_above_one.exp() if self.learn else self.fixed

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        # Half precision has too few digits and too little range for powers.
        wide = torch.promote_types(x.dtype, torch.float32)
        pooled = self._pool(x.to(wide), padding).to(x.dtype)
        if padding is None:
            return pooled
        return pooled.masked_fill(padding.all(1, keepdim=True), 0.0)

    def _pool(self, x: Tensor, padding: Tensor | None) -> Tensor:
        hidden = None if padding is None else padding[..., None]
        # In halves, so that no difference of two finite features overflows.
        half = x / 2
        least = torch.zeros_like(half[:, :1])
        if self.shift:
            above = half
            if hidden is not None:
                above = half.masked_fill(hidden, torch.finfo(x.dtype).max)
            least = above.amin(1, keepdim=True)
        tiny = torch.finfo(x.dtype).tiny
        distance = (half - least).clamp(min=tiny if self.shift else EPS / 2)
        if hidden is not None:
            distance = distance.masked_fill(hidden, 0.0)
        # The result is the same for any unit of length. With the largest distance as
        # the unit no power overflows, and the unit itself needs no gradient.
        unit = distance.detach().amax(1, keepdim=True).clamp(min=tiny)
        ratio = (distance / unit).clamp(min=EPS)
        p = self.p.to(x.dtype)
        # At least 1/N, except for an empty set.
        mean = (ratio**p * _shares(x, padding)).sum(1, keepdim=True).clamp(min=tiny)
        half_way = unit * mean ** (1 / p)
        # Twice the half, in an order in which no partial sum overflows.
        return (least + half_way + least + half_way)[:, 0]


class SoftmaxPooling(Pooling):
    """Mean of each feature, weighted by a softmax of the feature itself.

    ``y = Σ_i softmax_i(β x_i) x_i`` feature by feature; β = 0 is the average and
    β → ∞ the maximum.

    Source: the Boltzmann operator; as a pooling of sets e.g. Li et al. (2020),
    *DeeperGCN*, equation 5 (softmax aggregation), which learns β too. For an empty set
    the result is zero.

    Args:
        dim: D, the width of the vectors.
        beta: the inverse temperature, not negative; where it is learned, its initial
            value, above 0.
        learn: learn one for each feature, as ``exp(·)``.

    Raises:
        InputError: a negative inverse temperature, or 0 to be learned.
    """

    fixed: Tensor

    def __init__(self, dim: int, *, beta: float = 1.0, learn: bool = True) -> None:
        super().__init__(dim)
        if not beta >= 0 or (learn and beta == 0):
            least = "above 0 where it is learned" if learn else "of at least 0"
            raise InputError(f"pooling.beta: expected a number {least}, got {beta}")
        initial = torch.full((dim,), float(beta))
        if learn:
            self.log_beta = nn.Parameter(initial.log())
        else:
            self.register_buffer("fixed", initial, persistent=False)
        self.learn = learn

    @property
    def beta(self) -> Tensor:
        """The inverse temperatures, ``(D,)``."""
        return self.log_beta.exp() if self.learn else self.fixed

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, D)``; see `Pooling.forward`."""
        scores = x * self.beta
        if padding is not None:
            lowest = torch.finfo(x.dtype).min
            scores = scores.masked_fill(padding[..., None], lowest)
        # What lies under padding is zero, so an empty set gives zero.
        return (scores.softmax(1) * x).sum(1)


def _shares(x: Tensor, padding: Tensor | None) -> Tensor:
    """1/N for each token present, ``(B, N, 1)``."""
    if padding is None:
        return torch.full_like(x[..., :1], 1 / x.shape[1])
    present = (~padding).to(x.dtype)
    return (present / present.sum(1, keepdim=True).clamp(min=1))[..., None]
