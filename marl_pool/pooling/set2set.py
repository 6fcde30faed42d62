"""Set2Set: an LSTM that attends to the set several times."""

from torch import Tensor, cat, finfo, nn
from typing_extensions import override

from marl_pool.pooling.base import Pooling
from marl_pool.pooling.lstm import lstm_step
from marl_pool.tokens import Mask, Types
from marl_pool.utils.types import PositiveInt


class Set2SetPooling(Pooling):
    r"""Attention in several steps, whose queries an LSTM computes.

    .. math::
        q_t = \mathrm{LSTM}([q_{t-1}; r_{t-1}]), \qquad
        a_{t,i} = \mathrm{softmax}_i(x_i \cdot q_t), \qquad
        r_t = \sum_{i=1}^N a_{t,i}\, x_i

    The result is :math:`[q_T; r_T]`. State, query and :math:`r_0` start at zero, so the
    first query is the same for every set. The weights are those of the last step.

    Shapes: ``(B, N, D)`` to ``(B, 2 D)``; for an empty set every :math:`r_t` is zero.

    Source: Vinyals, Bengio and Kudlur (2016), *Order Matters: Sequence to sequence for
    sets*, https://arxiv.org/abs/1511.06391, equations 3 to 7. Differences: one bias for
    each gate, as in `LSTMPooling`; and :math:`q_{t-1}` enters twice, as a part of the
    input and as the hidden state, where the paper's LSTM has no input.

    Args:
        steps: T, the number of steps of the LSTM.
    """

    keeps_initial_weights = True

    def __init__(self, dim: int, *, steps: PositiveInt = 3) -> None:
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
        return self._read(x, padding)[1].softmax(1)[:, None] * _present(x, padding)

    @override
    def logits(self, x: Tensor, padding: Mask = None, types: Types = None) -> Tensor:
        x, padding, _ = self.prepare(x, padding, types)
        return self._read(x, padding)[1][:, None]

    def _read(self, x: Tensor, padding: Mask) -> tuple[Tensor, Tensor]:
        """Return the result and the scores ``(B, N)`` of the last step."""
        query = cell = x.new_zeros(x.shape[0], self.dim)
        result, scores = cat([query, query], 1), x.new_zeros(x.shape[:2])
        for _ in range(self.steps):
            gates = self.on_input(result) + self.on_state(query)
            query, cell = lstm_step(gates, cell)
            scores = (x @ query[..., None])[..., 0]
            if padding is not None:
                scores = scores.masked_fill(padding, finfo(scores.dtype).min)
            # Padded vectors are zero, so their weights in an empty set do not matter.
            read = (scores.softmax(1)[..., None] * x).sum(1)
            result = cat([query, read], 1)
        return result, scores


def _present(x: Tensor, padding: Mask) -> Tensor:
    """Return 1 for tokens present and 0 for padding, ``(B, 1, N)``."""
    if padding is None:
        return x.new_ones(x.shape[0], 1, x.shape[1])
    return (~padding).to(x.dtype)[:, None]
