"""Maximum, mean and sum of each feature, and means between average and maximum."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.types import Extent, PositiveFloat
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError

LARGEST = 1e30
"""Largest exponent or inverse temperature: products with it fit into float32."""
EPS = 1e-6
"""Lower bound of relative distances, where a power still has a gradient; and of the
features themselves with ``shift=False``, as published."""


class MaxPooling(Pooling):
    r"""Maximum of each feature over the tokens present.

    .. math::
        y_d = \max_{1 \le i \le N} x_{i,d}

    Extreme values of distractors pass unchanged, so the error grows as soon as noise
    exceeds signal in a feature. There are no attention weights: each feature chooses
    its own token.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    equations 4 and 5. Tokens that tie share the gradient equally (``torch.amax``).

    Example:
        >>> x = torch.tensor([[[1.0, 5.0], [3.0, 2.0]]])
        >>> MaxPooling(2)(x)
        tensor([[3., 5.]])
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        if padding is None:
            return x.amax(dim=1)
        lowest = torch.finfo(x.dtype).min
        largest = x.masked_fill(padding[..., None], lowest).amax(dim=1)
        return largest.masked_fill(padding.all(dim=1, keepdim=True), 0.0)


class AvgPooling(Pooling):
    r"""Mean of each feature over the tokens present.

    .. math::
        y = \frac{1}{N} \sum_{i=1}^N x_i

    All tokens have the weight 1/N, so each distractor dilutes the signal a little more.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the AdaPool paper (Brothers, 2025, https://arxiv.org/abs/2506.09215),
    equations 2 and 3.

    Example:
        >>> x = torch.tensor([[[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]]])
        >>> AvgPooling(2)(x, padding=torch.tensor([[False, False, True]]))
        tensor([[2.0000, 3.5000]])
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        if padding is None:
            return x.mean(dim=1)
        present = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
        return (widened(x).sum(dim=1) / present).to(x.dtype)

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return uniform_weights(x, padding)[:, None]


class SumPooling(Pooling):
    r"""Sum of each feature over the tokens present.

    .. math::
        y = \sum_{i=1}^N x_i

    The norm grows with the number of tokens, so larger sets than in training give
    larger results.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Zaheer et al. (2017), *Deep Sets*, https://arxiv.org/abs/1703.06114,
    theorem 2.
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return x.sum(dim=1)


class PowerMeanPooling(Pooling):
    r"""Power mean (GeM) of each feature, with a learned exponent from mean to maximum.

    .. math::
        y = m + \left(\frac{1}{N} \sum_{i=1}^N (x_i - m)^p\right)^{1/p}, \qquad
        m = \min_i x_i

    p = 1 is the average, and p → ∞ the maximum.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Radenović, Tolias and Chum (2018), https://arxiv.org/abs/1711.02512,
    equation 3, which clamps negative features to a small number (``shift=False``).
    Measured from the smallest feature of the set, the mean lies between average and
    maximum for any features.

    Args:
        p: the exponent, at least 1; if learned, its initial value, above 1.
        learn: learn the exponent, as ``1 + exp(·)``.
        shift: measure from the smallest feature; otherwise from 0.
    """

    fixed: Tensor

    def __init__(
        self,
        dim: Extent,
        *,
        p: PositiveFloat = 3.0,
        learn: bool = True,
        shift: bool = True,
    ) -> None:
        super().__init__(dim)
        if not 1 <= p <= LARGEST or (learn and p == 1):
            least = "above 1 where it is learned" if learn else "of at least 1"
            raise InputError(
                f"pooling.p: expected a number {least}, at most {LARGEST:g}, got {p}"
            )
        self.shift = shift
        self.learn = learn
        if learn:
            self.log_above_one = nn.Parameter(torch.tensor(p - 1.0).log())
        else:
            self.register_buffer("fixed", torch.tensor(p), persistent=False)

    @property
    def p(self) -> Tensor:
        """The exponent."""
        return 1 + self.log_above_one.exp() if self.learn else self.fixed

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        pooled = self._pool(widened(x), padding).to(x.dtype)
        if padding is not None:
            pooled = pooled.masked_fill(padding.all(1, keepdim=True), 0.0)
        return pooled

    def _pool(self, x: Tensor, padding: Mask) -> Tensor:
        hidden = None if padding is None else padding[..., None]
        tiny, largest = torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max
        # Halve the features, so that no difference overflows.
        half = x / 2
        least = torch.zeros_like(half[:, :1])
        # Shift the features to at least 0; otherwise clamp them there.
        if self.shift:
            above = half if hidden is None else half.masked_fill(hidden, largest)
            least = above.amin(1, keepdim=True)
        distance = (half - least).clamp(min=tiny if self.shift else EPS / 2)
        if hidden is not None:
            distance = distance.masked_fill(hidden, 0.0)
        # The mean is homogeneous: in units of the largest distance no power overflows,
        # and since the unit cancels, it needs no gradient.
        unit = distance.detach().amax(1, keepdim=True).clamp(min=tiny)
        ratio = (distance / unit).clamp(min=EPS)
        p = self.p.to(x.dtype)
        # At least 1/N, except for an empty set.
        weights = uniform_weights(x, padding)[..., None]
        mean = (ratio**p * weights).sum(1, keepdim=True).clamp(min=tiny)
        rise = unit * mean ** (1 / p)
        # Undo the halving, in an order in which no partial sum overflows.
        return (least + rise + least + rise)[:, 0]


class SoftmaxPooling(Pooling):
    r"""Mean of each feature, weighted by the softmax of that feature.

    .. math::
        y_d = \sum_{i=1}^N \mathrm{softmax}_i(\beta_d\, x_{i,d})\; x_{i,d}

    β = 0 is the average, and a large β almost the maximum.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the Boltzmann operator; as a pooling of sets with a learned β, Li et al.
    (2020), *DeeperGCN*, https://arxiv.org/abs/2006.07739, equation 5.

    Args:
        beta: the inverse temperature; if learned, its initial value, above 0.
        learn: learn one inverse temperature for each feature, as ``exp(·)``.
    """

    fixed: Tensor

    def __init__(self, dim: Extent, *, beta: float = 1.0, learn: bool = True) -> None:
        super().__init__(dim)
        lowest = 1 / LARGEST if learn else 0.0
        if not lowest <= beta <= LARGEST:
            raise InputError(
                f"pooling.beta: expected a number in [{lowest:g}, {LARGEST:g}]"
                f"{' where it is learned' * learn}, got {beta}"
            )
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

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        scores = widened(x) * self.beta
        if padding is not None:
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(padding[..., None], lowest)
        # Padded vectors are zero, so an empty set gives zero whatever its weights are.
        return (scores.softmax(1) * x).sum(1).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """Return half precision, which has too small a range for sums, as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def uniform_weights(x: Tensor, padding: Mask) -> Tensor:
    """Return 1/N for each of the N tokens present, ``(B, slots)``; 0 for padding."""
    present = torch.ones_like(x[..., 0]) if padding is None else (~padding).to(x.dtype)
    return present / present.sum(1, keepdim=True).clamp(min=1)
