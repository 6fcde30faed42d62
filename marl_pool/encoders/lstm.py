"""Bidirectional LSTM over the vectors in their given order, or sorted."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from marl_pool.encoders.base import Encoder
from marl_pool.kernels.functional import is_transformed
from marl_pool.options.types import Repeats, Size
from marl_pool.tokens import Mask


class LSTMEncoder(Encoder):
    """Bidirectional LSTM layers and a projection back to the width: a baseline.

    Padded slots are skipped. Unsorted, it is a control that depends on the order. With
    vectors sorted by the first feature, then the second, it is permutation equivariant,
    unless two vectors are equal in both.

    Source: SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400), section 4.1.2
    (LSTM, LSTM (sorted)); it sorts points, a policy sorts embedded tokens.

    Args:
        dim: D, the width of the vectors in and out.
        hidden: units in each direction; None means D.
        num_layers: number of LSTM layers.
        sort: sort the vectors first.
    """

    keeps_initial_weights = True

    permutation_equivariant = False

    def __init__(
        self,
        *,
        dim: Size = 8,
        hidden: Size | None = None,
        num_layers: Repeats = 1,
        sort: bool = False,
    ) -> None:
        super().__init__()
        hidden = hidden or dim
        self.dim, self.sort = dim, sort
        self.permutation_equivariant = sort
        self.lstm = nn.LSTM(
            dim, hidden, num_layers, batch_first=True, bidirectional=True
        )
        self.project = nn.Linear(2 * hidden, dim)

    @override
    def forward(self, x: Tensor, padding: Mask = None) -> Tensor:
        if padding is None and not self.sort:
            return self.project(self._read(x, None))
        # Sort the vectors, encode them, and restore their order.
        order = self._order(x, padding)[..., None]
        sequence = x.gather(1, order.expand_as(x))
        if padding is not None:
            padding = padding.gather(1, order[..., 0])
        encoded = self.project(self._read(sequence, padding))
        return torch.empty_like(encoded).scatter(1, order.expand_as(encoded), encoded)

    def _order(self, x: Tensor, padding: Mask) -> Tensor:
        """Return indices ``(B, N)`` in reading order, padding last."""
        order = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        # Stable sorts, from the least to the most significant key.
        keys = [x[..., min(1, x.shape[-1] - 1)], x[..., 0]] if self.sort else []
        for key in [*keys, *([] if padding is None else [padding.byte()])]:
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
        return order

    def _read(self, sequence: Tensor, padding: Mask) -> Tensor:
        """Run all layers on ``(B, N, D)``, whose padded slots are last."""
        # Packing needs concrete lengths and at least one row, and vmap does not support
        # `nn.LSTM`.
        compiling = torch.compiler.is_compiling()
        if (is_transformed() and not compiling) or sequence.shape[0] == 0:
            return self._read_stepwise(sequence, padding)
        # Without padding, all sequences have the same length.
        if padding is None:
            return self.lstm(sequence)[0]
        # An empty set cannot be packed: read one slot, whose result is ignored.
        lengths = (~padding).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(
            sequence, lengths, batch_first=True, enforce_sorted=False
        )
        encoded, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=sequence.shape[1]
        )
        return encoded

    def _read_stepwise(self, sequence: Tensor, padding: Mask) -> Tensor:
        """Compute the result of `nn.LSTM` by plain operations."""
        places = list(range(sequence.shape[1]))
        # Two sets of weights for each layer: forward, then backward.
        weights = iter(self.lstm.all_weights)
        for forward, backward in zip(weights, weights, strict=True):
            first = self._read_one_way(sequence, padding, forward, places)
            last = self._read_one_way(sequence, padding, backward, places[::-1])
            sequence = torch.cat([first, last], -1)
        return sequence

    def _read_one_way(
        self, x: Tensor, padding: Mask, weights: Sequence[Tensor], order: list[int]
    ) -> Tensor:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        # The inputs' share of the gates is one product over all slots.
        on_input = linear(x, weight_ih, bias_ih)
        hidden = cell = x.new_zeros(x.shape[0], self.lstm.hidden_size)
        outputs = {}
        for place in order:
            gates = on_input[:, place] + linear(hidden, weight_hh, bias_hh)
            # Gates are in torch's order: input, forget, content, output.
            input_gate, forget_gate, content, output_gate = gates.chunk(4, -1)
            new_cell = forget_gate.sigmoid() * cell
            new_cell = new_cell + input_gate.sigmoid() * content.tanh()
            new_hidden = output_gate.sigmoid() * new_cell.tanh()
            outputs[place] = new_hidden
            if padding is not None and place:  # an empty set reads one slot
                skip = padding[:, place, None]
                outputs[place] = new_hidden.masked_fill(skip, 0.0)
                new_cell = torch.where(skip, cell, new_cell)
                new_hidden = torch.where(skip, hidden, new_hidden)
            hidden, cell = new_hidden, new_cell
        return torch.stack([outputs[place] for place in sorted(order)], 1)
