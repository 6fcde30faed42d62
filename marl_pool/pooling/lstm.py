"""An LSTM's last output: a control that depends on the order."""

import torch
from torch import Tensor, nn

from marl_pool.pooling.base import Pooling
from marl_pool.utils.types import PositiveInt


class LSTMPooling(Pooling):
    """Read the vectors one after the other and return the last hidden state.

    Padded places are passed over as if they were not there. For an empty set the
    result is zero. It depends on the order, and is here as a control.

    Source: Hochreiter and Schmidhuber (1997), with a forget gate; one bias for each
    gate.

    Args:
        dim: D, the width of the vectors.
        hidden: width of the state and of the result; None means D.
    """

    permutation_invariant = False
    keeps_initial_weights = True

    def __init__(self, dim: int, *, hidden: PositiveInt | None = None) -> None:
        super().__init__(dim, dim_out=hidden)
        self.on_input = nn.Linear(dim, 4 * self.dim_out)
        self.on_state = nn.Linear(self.dim_out, 4 * self.dim_out, bias=False)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Pool ``(B, N, D)`` to ``(B, hidden)``; see `Pooling.forward`."""
        hidden = cell = x.new_zeros(x.shape[0], self.dim_out)
        for place, gates in enumerate(self.on_input(x).unbind(1)):
            gates = gates + self.on_state(hidden)
            enter, forget, leave, content = gates.chunk(4, -1)
            new_cell = forget.sigmoid() * cell + enter.sigmoid() * content.tanh()
            new_hidden = leave.sigmoid() * new_cell.tanh()
            if padding is not None:
                skip = padding[:, place, None]
                new_cell = torch.where(skip, cell, new_cell)
                new_hidden = torch.where(skip, hidden, new_hidden)
            cell, hidden = new_cell, new_hidden
        return hidden
