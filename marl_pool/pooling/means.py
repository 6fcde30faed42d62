"""Means between the average and the maximum of each feature, with a learned place."""

import torch
from torch import Tensor, nn

from marl_pool.errors import InputError
from marl_pool.pooling.base import Pooling
from marl_pool.types import PositiveFloat

EPS = 1e-6
"""Below which a distance counts as this much: 0 has no gradient under a power."""


class PowerMean(Pooling):
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
        least = torch.zeros_like(x[:, :1])
        if self.shift:
            above = x
            if padding is not None:
                largest = torch.finfo(x.dtype).max
                above = x.masked_fill(padding[..., None], largest)
            least = above.amin(1, keepdim=True)
        distance = (x - least).clamp(min=EPS)
        present = _shares(x, padding)
        # Relative to the largest one no power can overflow.
        top = (distance * (present > 0)).amax(1, keepdim=True).clamp(min=EPS)
        powers = (distance / top) ** self.p
        mean = (powers * present).sum(1, keepdim=True).clamp(min=EPS)
        pooled = (least + top * mean ** (1 / self.p))[:, 0]
        if padding is None:
            return pooled
        return pooled.masked_fill(padding.all(1, keepdim=True), 0.0)


class SoftmaxPool(Pooling):
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
