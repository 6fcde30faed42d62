"""Statistics of each feature, some of them robust, and their combination in PNA."""

from collections.abc import Sequence
from math import log
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from marl_pool.options.types import Extent, PositiveFloat, Size, UnitInterval
from marl_pool.pooling.base import Pooling
from marl_pool.pooling.basic import AvgPooling, MaxPooling, widened
from marl_pool.tokens import Mask, Types
from marl_pool.utils.errors import InputError

Aggregator = Literal["mean", "max", "min", "std"]
Scaler = Literal["identity", "amplification", "attenuation"]
EPS = 1e-5
"""Added to variances, so that the gradient of their root is finite at zero."""


class SqrtNPooling(Pooling):
    r"""Sum of each feature, divided by the root of the number of tokens present.

    .. math::
        y = \frac{1}{\sqrt{N}} \sum_{i=1}^N x_i

    The variance of independent tokens with mean zero is the same for any number of
    them; the sum's grows with N, and the mean's falls.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: the combiner ``sqrtn`` of `TensorFlow's embedding_lookup_sparse
    <https://www.tensorflow.org/api_docs/python/tf/nn/embedding_lookup_sparse>`_, with
    weights of 1.
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        count = _count(x, padding).clamp(min=1)[:, None]
        x_wide = widened(x)
        return (x_wide.sum(dim=1) / count.to(x_wide.dtype).sqrt()).to(x.dtype)


class StdPooling(Pooling):
    r"""Standard deviation of each feature over the tokens present.

    .. math::
        y = \sqrt{\frac{1}{N} \sum_{i=1}^N (x_i - \bar x)^2 + \epsilon}

    ε = 1e-5 keeps the gradient finite where all tokens are equal; the result is then
    0.0032. A shift of all tokens does not change the result.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Corso et al. (2020), *Principal Neighbourhood Aggregation for Graph Nets*,
    https://arxiv.org/abs/2004.05718, equation 3, and ε of its code.
    """

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        count = _count(x, padding)[:, None]
        present, x_wide = count.clamp(min=1), widened(x)
        deviation = x_wide - (x_wide.sum(dim=1) / present)[:, None]
        if padding is not None:
            deviation = deviation.masked_fill(padding[..., None], 0.0)
        variance = deviation.square().sum(dim=1) / present
        return (variance + EPS).sqrt().masked_fill(count == 0, 0.0).to(x.dtype)


class QuantilePooling(Pooling):
    r"""Quantiles of each feature, interpolated linearly; by default the median.

    .. math::
        y_q = x_{(\lfloor p \rfloor)}
            + (p - \lfloor p \rfloor)
              (x_{(\lceil p \rceil)} - x_{(\lfloor p \rfloor)}),
        \qquad p = q\,(N - 1)

    :math:`x_{(0)} \le x_{(1)} \le \dots` are the sorted values of a feature. The median
    stays within the range of the majority, however extreme fewer than half of the
    tokens are. Only the tokens at the quantile get a gradient.

    Shapes: ``(B, N, D)`` to ``(B, Q D)``, one quantile after the other; zero for an
    empty set.

    Source: ``QuantileAggregation`` of PyTorch Geometric; interpolated as by
    ``torch.quantile``.

    Args:
        levels: Q levels between 0, the minimum, and 1, the maximum.
    """

    def __init__(self, dim: Extent, *, levels: Sequence[UnitInterval] = (0.5,)) -> None:
        super().__init__(dim)
        if not levels:
            raise InputError("pooling.levels: expected at least one level, got none")
        self.levels = tuple(float(level) for level in levels)
        self.dim_out = len(self.levels) * dim

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        ordered, count = _sort(x, padding), _count(x, padding)
        # In double precision, since a position between tokens needs many digits.
        last = (count - 1).clamp(min=0).double()
        quantiles = [_at(ordered, level * last) for level in self.levels]
        return torch.cat(quantiles, dim=1).masked_fill((count == 0)[:, None], 0.0)


class TrimmedMeanPooling(Pooling):
    r"""Mean of each feature without its smallest and largest values.

    .. math::
        y = \frac{1}{N - 2k} \sum_{i=k}^{N-1-k} x_{(i)}, \qquad
        k = \lfloor \mathrm{fraction} \cdot N \rfloor

    :math:`x_{(0)} \le x_{(1)} \le \dots` are the sorted values of a feature. Up to k
    extreme tokens cannot move the result out of the range of the others. A fraction of
    0 is the mean, one of 0.25 the interquartile mean.

    Shapes: ``(B, N, D)`` to ``(B, D)``; zero for an empty set.

    Source: Tukey and McLaughlin (1963), *Less Vulnerable Confidence and Significance
    Procedures for Location Based on a Single Sample*; rounded as by
    ``scipy.stats.trim_mean``.

    Args:
        fraction: fraction of the tokens removed at either end, in [0, 0.5).
    """

    def __init__(
        self, dim: Extent, *, fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.25
    ) -> None:
        super().__init__(dim)
        self.fraction = fraction

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        count = _count(x, padding)[:, None]
        cut = (count.double() * self.fraction).long()
        rank = torch.arange(x.shape[1], device=x.device)
        removed = (rank < cut) | (rank >= count - cut)
        kept = _sort(x, padding).masked_fill(removed[..., None], 0.0)
        return (widened(kept).sum(dim=1) / (count - 2 * cut).clamp(min=1)).to(x.dtype)


class PNAPooling(Pooling):
    r"""Mean, maximum, minimum and standard deviation, each scaled by the set's size.

    .. math::
        y = \begin{bmatrix} 1 \\ \log(N + 1) / \delta \\ \delta / \log(N + 1)
            \end{bmatrix} \otimes
            \begin{bmatrix} \mathrm{mean} \\ \max \\ \min \\ \mathrm{std}
            \end{bmatrix}

    The scalers tell sets of different sizes apart, which mean and maximum cannot. There
    is no learned layer: in a policy the action and value heads mix the 12 parts.

    Shapes: ``(B, N, D)`` to ``(B, S A D)`` for S scalers and A aggregators, all
    aggregators with the first scaler first; zero for an empty set.

    Source: Corso et al. (2020), *Principal Neighbourhood Aggregation for Graph Nets*,
    https://arxiv.org/abs/2004.05718, equations 5 to 7.

    Args:
        aggregators: names from mean, max, min and std.
        scalers: names from identity, amplification and attenuation, the rows of the
            first bracket.
        avg_log_size: δ, the mean of log(N + 1) over the training sets; by default
            log(N + 1) of a set without padding, which is saved and loaded with the
            weights, so that they compute the same where N is another number.
        num_tokens: N of a set without padding.
    """

    avg_log_size: Tensor

    def __init__(
        self,
        dim: Extent,
        *,
        aggregators: Sequence[Aggregator] = ("mean", "max", "min", "std"),
        scalers: Sequence[Scaler] = ("identity", "amplification", "attenuation"),
        avg_log_size: PositiveFloat | None = None,
        num_tokens: Size | None = None,
    ) -> None:
        super().__init__(dim)
        is_default = avg_log_size is None
        if avg_log_size is None:
            if num_tokens is None:
                raise InputError(
                    "pooling.avg_log_size: expected a number, or num_tokens from which "
                    "it follows, got neither"
                )
            avg_log_size = log(num_tokens + 1)
        for name, choices in (("aggregators", aggregators), ("scalers", scalers)):
            if not choices:
                raise InputError(f"pooling.{name}: expected at least one, got none")
        self.aggregators, self.scalers = tuple(aggregators), tuple(scalers)
        # An option determines it without the weights.
        size = torch.tensor(avg_log_size)
        self.register_buffer("avg_log_size", size, persistent=is_default)
        self.dim_out = len(self.scalers) * len(self.aggregators) * dim
        self._mean, self._max, self._std = (
            cls(dim) for cls in (AvgPooling, MaxPooling, StdPooling)
        )

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        aggregates = {
            "mean": self._mean,
            "max": self._max,
            "min": lambda x, padding: -self._max(-x, padding),
            "std": self._std,
        }
        parts = [aggregates[name](x, padding) for name in self.aggregators]
        combined = torch.cat(parts, dim=1)
        size = _count(x, padding).clamp(min=1)[:, None]
        amplification = (size + 1).to(x.dtype).log() / self.avg_log_size
        scaled = {
            "identity": lambda: combined,
            "amplification": lambda: combined * amplification,
            "attenuation": lambda: combined / amplification,
        }
        return torch.cat([scaled[name]() for name in self.scalers], dim=1)

    @override
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        # Weights of earlier revisions lack it, and their N was this head's.
        if "avg_log_size" in self.state_dict():
            state_dict.setdefault(f"{prefix}avg_log_size", self.avg_log_size)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _count(x: Tensor, padding: Mask) -> Tensor:
    """Return the number of tokens present, ``(B,)`` int64."""
    if padding is None:
        return torch.full_like(x[:, 0, 0], x.shape[1], dtype=torch.int64)
    return (~padding).sum(dim=1)


def _sort(x: Tensor, padding: Mask) -> Tensor:
    """Sort each feature in ascending order, padding last."""
    if padding is not None:
        x = x.masked_fill(padding[..., None], torch.finfo(x.dtype).max)
    return x.sort(dim=1).values


def _at(ordered: Tensor, position: Tensor) -> Tensor:
    """Return the values ``(B, D)`` at positions ``(B,)`` between two tokens."""
    low, high = (
        ordered.gather(1, place.long()[:, None, None].expand(-1, 1, ordered.shape[2]))
        for place in (position.floor(), position.ceil())
    )
    weight = position.frac().to(ordered.dtype)
    return low[:, 0].lerp(high[:, 0], weight[:, None])
