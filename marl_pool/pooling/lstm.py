"""An LSTM's last hidden state, a control that depends on the order."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class LSTMPooling(Pooling):
    r"""Last hidden state of an LSTM that reads the vectors in their order.

    .. math::
        (i, f, o, u) = W x_t + R h_{t-1} + b, \qquad
        c_t = \sigma(f)\, c_{t-1} + \sigma(i) \tanh(u), \qquad
        h_t = \sigma(o) \tanh(c_t)

    The result is :math:`h_N`. Padded slots are skipped. As it depends on the order, it
    is a control: a shuffle must change its result.

    Shapes: ``(B, N, D)`` to ``(B, hidden)``; zero for an empty set.

    Source: Hochreiter and Schmidhuber (1997), *Long Short-Term Memory*, with a forget
    gate. Difference from ``torch.nn.LSTM``: one bias for each gate instead of two.

    Args:
        hidden: width of the state and of the result; None means D.
    """

    permutation_invariant = False
    keeps_initial_weights = True

    def __init__(self, dim: int, *, hidden: PositiveInt | None = None) -> None:
        super().__init__(dim)
        self.dim_out = hidden or dim
        self.on_input = nn.Linear(dim, 4 * self.dim_out)
        self.on_state = nn.Linear(self.dim_out, 4 * self.dim_out, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], self.dim_out)
        # The input's part of all gates is one product; only the state's is sequential.
        for slot, gates in enumerate(self.on_input(x).unbind(1)):
            gates = gates + self.on_state(hidden)
            new_hidden, new_cell = lstm_step(gates, cell)
            # Padded tokens leave the state unchanged.
            if padding is not None:
                skip = padding[:, slot, None]
                new_cell = torch.where(skip, cell, new_cell)
                new_hidden = torch.where(skip, hidden, new_hidden)
            cell, hidden = new_cell, new_hidden
        return hidden


def lstm_step(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new hidden state and cell from the gates ``(B, 4 H)``."""
    input_gate, forget_gate, output_gate, content = gates.chunk(4, -1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * content.tanh()
    return output_gate.sigmoid() * cell.tanh(), cell
