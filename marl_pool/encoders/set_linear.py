"""Set-linear layers: each vector by itself, and the others pooled."""

import itertools
from typing import Literal

import torch
from torch import Tensor, nn

from marl_pool.encoders.base import Encoder
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import PositiveInt

Others = Literal["sum", "mean", "max"]
CHOICES = ("sum", "mean", "max")


class SetLinear(nn.Module):
    """``y_i = W_own x_i + W_others pool_{j ≠ i} x_j + b``, or with the maximum of all.

    Source: Zaheer et al. (2017); SWARM (Vollgraf, 2019), equation 2, which is a *sum*
    over the others. Its experiments call their layers mean and max pooling, so all
    three are here. As in its published code the maximum is ``max_j W_others x_j``,
    feature by feature, over all vectors, the own one among them. There the mean is
    over all as well: the same functions for a set of given size.

    Args:
        dim_in: width of the vectors.
        dim_out: width of the results.
        others: how the others are pooled, "sum" or "mean", of none zero; or "max".
    """

    def __init__(self, dim_in: int, dim_out: int, others: Others) -> None:
        super().__init__()
        self.others = others
        self.on_own = nn.Linear(dim_in, dim_out)
        self.on_others = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map ``(B, N, dim_in)``, zero under padding, to ``(B, N, dim_out)``."""
        if self.others == "max":
            each = self.on_others(x)
            if padding is not None:
                # Finite, so that a set without any vector has no NaN.
                lowest = torch.finfo(each.dtype).min
                each = each.masked_fill(padding[..., None], lowest)
                each = each.masked_fill(padding.all(1)[:, None, None], 0.0)
            return self.on_own(x) + each.amax(1, keepdim=True)
        # Both are linear: sums of the results are results of the sums, and cheaper.
        each = self.on_others(x)
        total = each.sum(1, keepdim=True)
        if self.others == "sum":
            return self.on_own(x) + (total - each)
        if padding is None:
            count = torch.tensor(x.shape[1], dtype=x.dtype, device=x.device)
        else:
            count = (~padding).sum(1)[:, None, None].to(x.dtype)
        return self.on_own(x) + (total - each) / (count - 1).clamp(min=1)


class SetLinearEncoder(Encoder):
    """Set-linear layers with ReLU between them, and a last one back to the width.

    Source: SWARM, sections 2 and 4.1.2 (SetLinear, SetLinear (max)), where a ReLU
    follows every layer; here the last has none, so that vectors may be negative.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: layers, with ReLU between them.
        hidden: width between the layers; None means D.
        others: pooling of the others: sum or mean; or max, the largest of all.

    Raises:
        InputError: a number out of range or an unknown pooling.
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
        hidden = dim if hidden is None else hidden
        sizes = {"dim": dim, "num_layers": num_layers, "hidden": hidden}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"encoder.{name}: expected at least 1, got {size}")
        if others not in CHOICES:
            raise unknown("encoder.others", others, CHOICES)
        self.dim = dim
        widths = [dim, *[hidden] * (num_layers - 1), dim]
        self.layers = nn.ModuleList(
            SetLinear(*pair, others) for pair in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``; see `Encoder.forward`."""
        for number, layer in enumerate(self.layers):
            if number:
                x = x.relu()
            if padding is not None:
                x = x.masked_fill(padding[..., None], 0)
            x = layer(x, padding)
        return x
