"""Heads with an LSTM, which reads the set in order or queries it."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.options.types import Extent, Size
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Mask, Types


class LSTMPooling(Pooling):
    r"""Last hidden state of an LSTM that reads the vectors in order: a control.

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

    def __init__(self, dim: Extent, *, hidden: Size | None = None) -> None:
        super().__init__(dim)
        self.dim_out = hidden or dim
        self.on_input = nn.Linear(dim, 4 * self.dim_out)
        self.on_state = nn.Linear(self.dim_out, 4 * self.dim_out, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], self.dim_out)
        # The inputs' share of all gates is one product; only the state's is sequential.
        for slot, gates in enumerate(self.on_input(x).unbind(1)):
            gates = gates + self.on_state(hidden)
            new_hidden, new_cell = _lstm_step(gates, cell)
            # Padded tokens leave the state unchanged.
            if padding is not None:
                skip = padding[:, slot, None]
                new_cell = torch.where(skip, cell, new_cell)
                new_hidden = torch.where(skip, hidden, new_hidden)
            cell, hidden = new_cell, new_hidden
        return hidden


class Set2SetPooling(Pooling):
    r"""Attention in several steps, whose queries an LSTM computes.

    .. math::
        q_t = \mathrm{LSTM}([q_{t-1}; r_{t-1}]), \qquad
        a_{t,i} = \mathrm{softmax}_i(x_i \cdot q_t), \qquad
        r_t = \sum_{i=1}^N a_{t,i}\, x_i

    The result is :math:`[q_T; r_T]`. State, query and :math:`r_0` start at zero, so the
    first query is the same for every set. `weights` returns those at the last step.

    Shapes: ``(B, N, D)`` to ``(B, 2 D)``; for an empty set every :math:`r_t` is zero.

    Source: Vinyals, Bengio and Kudlur (2016), *Order Matters: Sequence to sequence for
    sets*, https://arxiv.org/abs/1511.06391, equations 3 to 7. Differences: one bias for
    each gate, as in `LSTMPooling`; and :math:`q_{t-1}` enters twice, as a part of the
    input and as the hidden state, where the paper's LSTM has no input.

    Args:
        steps: T, the number of steps of the LSTM.
    """

    keeps_initial_weights = True

    def __init__(self, dim: Extent, *, steps: Size = 3) -> None:
        super().__init__(dim)
        self.steps = steps
        self.dim_out = 2 * dim
        self.on_input = nn.Linear(2 * dim, 4 * dim)
        self.on_state = nn.Linear(dim, 4 * dim, bias=False)

    @override
    def forward(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        return self._read(x, padding)[0]

    @override
    def weights(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        weights = self._read(x, padding)[1].softmax(1)
        if padding is not None:
            weights = weights.masked_fill(padding, 0.0)
        return weights[:, None]

    @override
    def logits(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        return self._read(x, padding)[1][:, None]

    def _read(self, x: Tensor, padding: Mask) -> tuple[Tensor, Tensor]:
        """Return the result and the scores ``(B, N)`` of the last step."""
        query = cell = x.new_zeros(x.shape[0], self.dim)
        result, scores = torch.cat([query, query], 1), x.new_zeros(x.shape[:2])
        for _ in range(self.steps):
            gates = self.on_input(result) + self.on_state(query)
            query, cell = _lstm_step(gates, cell)
            scores = (x @ query[..., None])[..., 0]
            if padding is not None:
                scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
            # Padded vectors are zero, so their weights in an empty set do not matter.
            read = (scores.softmax(1)[..., None] * x).sum(1)
            result = torch.cat([query, read], 1)
        return result, scores


def _lstm_step(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new hidden state and cell from the gates ``(B, 4 H)``."""
    input_gate, forget_gate, output_gate, content = gates.chunk(4, -1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * content.tanh()
    return output_gate.sigmoid() * cell.tanh(), cell
