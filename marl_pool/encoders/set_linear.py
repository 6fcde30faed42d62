"""Set-linear layers: linear in each vector and in the pooled others."""

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.tokens import Mask
from marl_pool.utils.types import PositiveInt

Others = Literal["sum", "mean", "max"]


class SetLinear(nn.Module):
    r"""Linear layer on a vector and on a pooling of the other vectors.

    .. math::
        y_i = W_{own}\, x_i + b + W_{others} \sum_{j \ne i} x_j, \qquad
        y_i = W_{own}\, x_i + b + \max_j W_{others}\, x_j

    The mean divides the sum by the number of others. The maximum is taken feature by
    feature over all vectors, i included. Without others, sum and mean are zero.

    Source: Zaheer et al. (2017), *Deep Sets*, https://arxiv.org/abs/1703.06114; SWARM
    (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), equation 2, which is the sum.
    The mean of its published code includes i, which gives the same functions for sets
    of a given size.
    """

    def __init__(self, dim_in: int, dim_out: int, others: Others) -> None:
        super().__init__()
        self.others = others
        self.on_own = nn.Linear(dim_in, dim_out)
        self.on_others = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        """Map ``(B, N, dim_in)``, zero under padding, to ``(B, N, dim_out)``."""
        each = self.on_others(x)
        # The maximum includes the token itself.
        if self.others == "max":
            if padding is not None:
                # Finite, so that an empty set has no NaN.
                lowest = torch.finfo(each.dtype).min
                each = each.masked_fill(padding[..., None], lowest)
                each = each.masked_fill(padding.all(1)[:, None, None], 0.0)
            return self.on_own(x) + each.amax(1, keepdim=True)
        # The layer is linear, so the others' sum is the total minus the own result.
        total = each.sum(1, keepdim=True)
        if self.others == "sum":
            return self.on_own(x) + (total - each)
        # The mean is over the other tokens that are present.
        if padding is None:
            count = x.new_full((), x.shape[1])
        else:
            count = (~padding).sum(1)[:, None, None].to(x.dtype)
        return self.on_own(x) + (total - each) / (count - 1).clamp(min=1)


class SetLinearEncoder(Encoder):
    """`SetLinear` layers with ReLU between them.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), sections 2 and
    4.1.2 (SetLinear, SetLinear (max)). Difference from the source: no ReLU after the
    last layer, so that vectors may be negative.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of layers.
        hidden: width between the layers; None means D.
        others: pooling of the others: "sum" or "mean"; or "max", over all vectors.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        num_layers: PositiveInt = 3,
        hidden: PositiveInt | None = None,
        others: Others = "mean",
    ) -> None:
        super().__init__()
        self.dim = dim
        widths = [dim, *[hidden or dim] * (num_layers - 1), dim]
        self.layers = nn.ModuleList(
            SetLinear(*pair, others) for pair in itertools.pairwise(widths)
        )

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number:
                x = x.relu()
            if padding is not None:
                x = x.masked_fill(padding[..., None], 0)
            x = layer(x, padding)
        return x
