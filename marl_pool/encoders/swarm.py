"""SWARM: an LSTM in every entity, which also hears what the population remembers."""

from typing import Literal

import torch
from torch import Tensor, nn

from marl_pool.encoders.base import Encoder
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import unknown
from marl_pool.utils.types import PositiveInt

Population = Literal["mean", "max", "causal"]
CHOICES = ("mean", "max", "causal")


class SwarmLayer(nn.Module):
    """Run one LSTM cell in all entities for some iterations.

    ``g_i = W_x x_i + W_h h_i + W_p p_i + b`` for each of the four gates, with
    ``p = pool(h_1, …, h_N)`` of the iteration before, the entity's own among them;
    ``c ← σ(f) c + σ(i) tanh(u)``, ``h ← σ(o) tanh(c)``, both zero at first. The same x
    enters every iteration; the result is ``W_y [h; c] + b_y``.

    Source: SWARM (Vollgraf, 2019), section 3 and Figure 1. Causal pooling (section
    4.3) is the mean over the entities up to one's own, in their order.

    Args:
        dim_in: width of the entities.
        units: of the memory.
        dim_out: width of the results.
        iterations: at least 1.
        population: how the hidden states are pooled.
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

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map ``(B, N, dim_in)`` to ``(B, N, dim_out)``."""
        # What does not change between iterations is computed once.
        constant = self.on_input(x)
        hidden, cell = self._cell(constant, None)
        for _ in range(self.iterations - 1):
            told = self.on_population(self._pool(hidden, padding))
            gates = self.on_hidden(hidden) + constant
            hidden, cell = self._cell(gates + told, cell)
        return self.output(torch.cat([hidden, cell], -1))

    def step(self, x: Tensor, sums: Tensor, place: int) -> Tensor:
        """Map one entity more of a causal population; the cost is that of one.

        Those before it are needed no more: what they remembered is in the sums.

        Args:
            x: ``(B, dim_in)``, the entity.
            sums: ``(iterations - 1, B, units)``, of the hidden states after each
                iteration but the last, over all entities so far; zero before the
                first. The entity's own are added, in place.
            place: how many came before.

        Returns:
            ``(B, dim_out)``, as `forward` gives it at this place.
        """
        constant = self.on_input(x)
        hidden, cell = self._cell(constant, None)
        for total in sums:
            total += hidden
            told = self.on_population(total / (place + 1))
            hidden, cell = self._cell(self.on_hidden(hidden) + constant + told, cell)
        return self.output(torch.cat([hidden, cell], -1))

    @staticmethod
    def _cell(gates: Tensor, cell: Tensor | None) -> tuple[Tensor, Tensor]:
        units = gates.shape[-1] // 4
        sigmoid = gates[..., : 3 * units].sigmoid()
        enter, forget, leave = sigmoid.chunk(3, -1)
        content = gates[..., 3 * units :].tanh()
        new = enter * content
        if cell is not None:
            new = new + forget * cell
        return leave * new.tanh(), new

    def _pool(self, hidden: Tensor, padding: Tensor | None) -> Tensor:
        """Pool ``(B, N, units)`` to ``(B, 1, units)``, causally ``(B, N, units)``."""
        if self.population == "max":
            if padding is not None:
                # Hidden states lie in (-1, 1).
                hidden = hidden.masked_fill(padding[..., None], -1)
            return hidden.amax(1, keepdim=True)
        there = torch.ones_like(hidden[..., :1])
        if padding is not None:
            there = (~padding)[..., None].to(hidden.dtype)
            hidden = hidden * there
        if self.population == "mean":
            return hidden.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
        return hidden.cumsum(1) / there.cumsum(1).clamp(min=1)


class SwarmEncoder(Encoder):
    """SWARM layers with ReLU between them.

    Source: SWARM (Vollgraf, 2019), sections 3 and 4.1.2. With ``population="causal"``
    it depends on the order (section 4.3).

    Args:
        dim: D, the width of the vectors in and out.
        units: width of each entity's memory; None means D.
        iterations: of each layer.
        num_layers: SWARM layers; the paper's best has one.
        population: pooling of the hidden states: mean, max or causal.

    Raises:
        InputError: a number out of range or an unknown pooling.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        units: PositiveInt | None = None,
        iterations: PositiveInt = 5,
        num_layers: PositiveInt = 1,
        population: Population = "mean",
    ) -> None:
        super().__init__()
        units = dim if units is None else units
        sizes = {
            "dim": dim,
            "units": units,
            "iterations": iterations,
            "num_layers": num_layers,
        }
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"encoder.{name}: expected at least 1, got {size}")
        if population not in CHOICES:
            raise unknown("encoder.population", population, CHOICES)
        self.dim = dim
        self.permutation_equivariant = population != "causal"
        self.layers = nn.ModuleList(
            SwarmLayer(dim, units, dim, iterations, population)
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``; see `Encoder.forward`."""
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x, padding)
        return x
