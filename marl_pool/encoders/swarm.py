"""SWARM, an LSTM for each entity that reads a pooled state, and set-linear layers."""

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.options.types import Repeats, Size
from marl_pool.tokens import Mask

Others = Literal["sum", "mean", "max"]
Population = Literal["mean", "max", "causal"]


class SetLinear(nn.Module):
    r"""Linear layer on a vector and on a pooling of the other vectors.

    .. math::
        y_i = W_{own}\, x_i + b + W_{others} \sum_{j \ne i} x_j, \qquad
        y_i = W_{own}\, x_i + b + \max_j W_{others}\, x_j

    The mean divides the sum by the number of others. The maximum of each feature is
    over all vectors, including i. Without others, sum and mean are zero.

    Source: Zaheer et al. (2017), *Deep Sets*, https://arxiv.org/abs/1703.06114; SWARM
    (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), equation 2, which is the sum.
    The mean of its published code includes i, which gives the same functions for sets
    of a given size.
    """

    def __init__(self, dim_in: int, dim_out: int, reduction: Others) -> None:
        super().__init__()
        self.reduction = reduction
        self.on_own = nn.Linear(dim_in, dim_out)
        self.on_others = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        """Map ``(B, N, dim_in)``, zero under padding, to ``(B, N, dim_out)``."""
        messages = self.on_others(x)
        # The maximum includes the token itself.
        if self.reduction == "max":
            if padding is not None:
                # Finite, so that an empty set gives no NaN.
                lowest = torch.finfo(messages.dtype).min
                messages = messages.masked_fill(padding[..., None], lowest)
                messages = messages.masked_fill(padding.all(1)[:, None, None], 0.0)
            return self.on_own(x) + messages.amax(1, keepdim=True)
        # The layer is linear, so the others' sum is the total minus the vector's own.
        total = messages.sum(1, keepdim=True)
        if self.reduction == "sum":
            return self.on_own(x) + (total - messages)
        # The mean is over the other tokens that are present.
        if padding is None:
            count = x.new_full((), x.shape[1])
        else:
            count = (~padding).sum(1)[:, None, None].to(x.dtype)
        # The sum over no others is 0, whatever it is divided by.
        return self.on_own(x) + (total - messages) / (count - 1).clamp(min=1)


class SetLinearEncoder(Encoder):
    """Linear layers of each token and the sum, mean or maximum of the others.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), sections 2 and
    4.1.2 (SetLinear, SetLinear (max)). Difference from the source: no ReLU after the
    last layer, so that vectors may be negative.

    Args:
        dim: D, the width of the vectors in and out.
        num_layers: number of layers.
        hidden: width between the layers; None means D.
        others: pooling of the other vectors, "sum" or "mean"; or "max", over all.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        *,
        dim: Size = 8,
        num_layers: Repeats = 3,
        hidden: Size | None = None,
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


class SwarmLayer(nn.Module):
    r"""Iterations of one LSTM cell, shared by all entities.

    .. math::
        (i, f, o, u)_n = W_x x_n + W_h h_n + W_p\, \mathrm{pool}(h_1, \dots, h_N) + b,
        \qquad
        c_n \leftarrow \sigma(f) c_n + \sigma(i) \tanh(u), \qquad
        h_n \leftarrow \sigma(o) \tanh(c_n)

    Hidden and cell states start at zero. The same :math:`x_n` enters every iteration,
    and the pooled states, n's included, are from the previous iteration. The result is
    :math:`W_y [h_n; c_n] + b_y`.

    Shapes: ``(B, N, dim_in)`` to ``(B, N, dim_out)``.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 3 and
    Figure 1. Causal pooling (section 4.3) is the mean over entities 1 to n.

    The arguments are as in `SwarmEncoder`.
    """

    def __init__(
        self,
        dim_in: int,
        units: int,
        dim_out: int,
        iterations: int,
        population: Population,
    ) -> None:
        super().__init__()
        self.iterations, self.population = iterations, population
        self.on_input = nn.Linear(dim_in, 4 * units)
        self.on_hidden = nn.Linear(units, 4 * units, bias=False)
        self.on_population = nn.Linear(units, 4 * units, bias=False)
        self.output = nn.Linear(2 * units, dim_out)

    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        """Map ``(B, N, dim_in)`` to ``(B, N, dim_out)``."""
        # The input's share of the gates is the same in all iterations.
        constant = self.on_input(x)
        hidden, cell = self._cell(constant, None)
        for _ in range(self.iterations - 1):
            pooled = self.on_population(self._pool(hidden, padding))
            hidden, cell = self._cell(self.on_hidden(hidden) + constant + pooled, cell)
        return self.output(torch.cat([hidden, cell], -1))

    def step(self, x: Tensor, sums: Tensor, place: int) -> Tensor:
        """Return the result ``(B, dim_out)`` of the next entity, causally pooled.

        Args:
            x: ``(B, dim_in)``, the entity.
            sums: ``(iterations - 1, B, units)``, for each iteration but the last, the
                sum of the hidden states of all entities so far. The new entity's states
                are added in place.
            place: number of entities before this one.
        """
        # As in `forward`, with the pooled states from running sums.
        constant = self.on_input(x)
        hidden, cell = self._cell(constant, None)
        for total in sums:
            total += hidden
            pooled = self.on_population(total / (place + 1))
            hidden, cell = self._cell(self.on_hidden(hidden) + constant + pooled, cell)
        return self.output(torch.cat([hidden, cell], -1))

    @staticmethod
    def _cell(gates: Tensor, cell: Tensor | None) -> tuple[Tensor, Tensor]:
        units = gates.shape[-1] // 4
        sigmoid = gates[..., : 3 * units].sigmoid()
        input_gate, forget_gate, output_gate = sigmoid.chunk(3, -1)
        new = input_gate * gates[..., 3 * units :].tanh()
        if cell is not None:
            new = new + forget_gate * cell
        return output_gate * new.tanh(), new

    def _pool(self, hidden: Tensor, padding: Mask) -> Tensor:
        """Pool ``(B, N, units)`` to ``(B, 1, units)``, causally ``(B, N, units)``."""
        if self.population == "max":
            if padding is not None:
                # Below all hidden states, which lie in (-1, 1).
                hidden = hidden.masked_fill(padding[..., None], -1)
            return hidden.amax(1, keepdim=True)
        present = torch.ones_like(hidden[..., :1])
        if padding is not None:
            present = (~padding)[..., None].to(hidden.dtype)
            hidden = hidden * present
        if self.population == "mean":
            count = present.sum(1, keepdim=True).clamp(min=1)
            return hidden.sum(1, keepdim=True) / count
        return hidden.cumsum(1) / present.cumsum(1).clamp(min=1)


class SwarmEncoder(Encoder):
    """Layers of one LSTM per token, which also reads the pooled state of all tokens.

    With ``population="causal"`` the result depends on the order of the vectors.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), sections 3, 4.1.2
    and 4.3 (causal).

    Args:
        dim: D, the width of the vectors in and out.
        units: width of each entity's hidden state and cell state; None means D.
        iterations: number of iterations of each layer.
        num_layers: number of layers; the paper's best model has one.
        population: pooling of the hidden states: "mean", "max" or "causal".
    """

    keeps_initial_weights = True

    def __init__(
        self,
        *,
        dim: Size = 8,
        units: Size | None = None,
        iterations: Repeats = 5,
        num_layers: Repeats = 1,
        population: Population = "mean",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.permutation_equivariant = population != "causal"
        # States are pooled between iterations, causally over earlier entities.
        self.mixes_first = population != "causal" and iterations > 1
        self.layers = nn.ModuleList(
            SwarmLayer(dim, units or dim, dim, iterations, population)
            for _ in range(num_layers)
        )

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x, padding)
        return x
