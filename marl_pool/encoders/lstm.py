"""A bidirectional LSTM over the vectors in their order, or sorted."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from marl_pool.encoders.base import Encoder
from marl_pool.kernels.transforms import is_transformed
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt


class LSTMEncoder(Encoder):
    """Bidirectional LSTM layers and a projection back to the width.

    Padded places are passed over as if they were not there. Unsorted it depends on the
    order: a baseline and a control. Sorted by the first feature, ties by the second,
    it is equivariant (where no two vectors agree in both).

    Source: SWARM (Vollgraf, 2019), section 4.1.2 (LSTM, LSTM (sorted)); Graves and
    Schmidhuber (2005). Where we differ: in a policy the vectors that are sorted are the
    embedded tokens, not points.

    Args:
        dim: D, the width of the vectors in and out.
        hidden: units in each direction; None means D.
        num_layers: LSTM layers.
        sort: sort the vectors first.

    Raises:
        InputError: a number out of range.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        *,
        dim: PositiveInt = 8,
        hidden: PositiveInt | None = None,
        num_layers: PositiveInt = 1,
        sort: bool = False,
    ) -> None:
        super().__init__()
        hidden = dim if hidden is None else hidden
        sizes = {"dim": dim, "hidden": hidden, "num_layers": num_layers}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"encoder.{name}: expected at least 1, got {size}")
        self.dim, self.sort = dim, sort
        self.permutation_equivariant = sort
        self.lstm = nn.LSTM(
            dim, hidden, num_layers, batch_first=True, bidirectional=True
        )
        self.project = nn.Linear(2 * hidden, dim)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Encode ``(B, N, D)`` to ``(B, N, D)``; see `Encoder.forward`."""
        if padding is None and not self.sort:
            return self.project(self._read(x, None))
        order = self._order(x, padding)[..., None]
        line = x.gather(1, order.expand_as(x))
        if padding is not None:
            padding = padding.gather(1, order[..., 0])
        encoded = self.project(self._read(line, padding))
        return torch.empty_like(encoded).scatter(1, order.expand_as(encoded), encoded)

    def _order(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Places ``(B, N)`` in the order of reading; padded ones come last."""
        order = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        # Stable sorts by the least important key first.
        keys = [x[..., min(1, x.shape[-1] - 1)], x[..., 0]] if self.sort else []
        for key in [*keys, *([] if padding is None else [padding.byte()])]:
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
        return order

    def _read(self, line: Tensor, padding: Tensor | None) -> Tensor:
        """Read ``(B, N, D)`` in both directions, padded places last."""
        # Packing needs lengths that are numbers, and a row; `nn.LSTM` cannot be mapped.
        compiling = torch.compiler.is_compiling()
        if (is_transformed() and not compiling) or line.shape[0] == 0:
            return self._read_stepwise(line, padding)
        if padding is None:
            return self.lstm(line)[0]
        # A row without any vector reads one that nobody looks at.
        lengths = (~padding).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(
            line, lengths, batch_first=True, enforce_sorted=False
        )
        read = self.lstm(packed)[0]
        return pad_packed_sequence(read, batch_first=True, total_length=line.shape[1])[
            0
        ]

    def _read_stepwise(self, line: Tensor, padding: Tensor | None) -> Tensor:
        """Compute what `nn.LSTM` does, by plain operations."""
        places = list(range(line.shape[1]))
        for layer in range(self.lstm.num_layers):
            sides = []
            for suffix, order in (("", places), ("_reverse", places[::-1])):
                read = self._read_one_way(line, padding, f"_l{layer}{suffix}", order)
                sides.append(read)
            line = torch.cat(sides, -1)
        return line

    def _read_one_way(
        self, line: Tensor, padding: Tensor | None, suffix: str, order: list[int]
    ) -> Tensor:
        def weight(name: str) -> Tensor:
            found = getattr(self.lstm, name + suffix)
            assert isinstance(found, Tensor)
            return found

        on_input = linear(line, weight("weight_ih"), weight("bias_ih"))
        hidden = cell = line.new_zeros(line.shape[0], self.lstm.hidden_size)
        outputs = {}
        for place in order:
            gates = on_input[:, place]
            gates = gates + linear(hidden, weight("weight_hh"), weight("bias_hh"))
            enter, forget, content, leave = gates.chunk(4, -1)
            new_cell = forget.sigmoid() * cell + enter.sigmoid() * content.tanh()
            new_hidden = leave.sigmoid() * new_cell.tanh()
            outputs[place] = new_hidden
            if padding is not None and place:  # a row reads one vector at least
                skip = padding[:, place, None]
                outputs[place] = new_hidden.masked_fill(skip, 0.0)
                new_cell = torch.where(skip, cell, new_cell)
                new_hidden = torch.where(skip, hidden, new_hidden)
            hidden, cell = new_hidden, new_cell
        return torch.stack([outputs[place] for place in sorted(order)], 1)
