"""AttentionNeuron: each token a sensory neuron, a fixed bank of queries reads them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from marl_pool.kernels.batched import Layer, batched_linear, strip_prefix, tanh
from marl_pool.kernels.lstm_sequence import Gates, lstm_sequence
from marl_pool.kernels.transforms import is_transformed
from marl_pool.pooling.memory import Memory, MemoryPooling
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import NonNegativeInt, PositiveFloat, PositiveInt


class AttentionNeuronPooling(MemoryPooling):
    r"""M codes, each a sum over the tokens with weights from keys that remember.

    .. math::
        m = \sigma\left(Q W_q\,(K W_k)^\top / \sqrt{d}\right) V

    The key :math:`f_k(o_i, a_{t-1})` comes from a token's recent readings and the
    previous action: by an LSTM that each token has to itself (``memory="lstm"``), or
    from frames stacked in the token's features (``memory="none"``): the frame itself
    if there is one, else the differences of consecutive frames. The value
    :math:`f_v(o_i)` is the token. Q is a table of sinusoids that is not learned. The
    result is the M codes one after the other.

    No token knows its place, so the order can be any, and change. A token that is
    padded for a while (a dropped sensor) keeps its memory.

    Source: Tang and Ha (2021), equations 1 and 2, sections 3.2 and 3.3, and the
    published code. Where we differ: the published CartPole layer has neither the
    scale nor biases (``scale=False, bias=False``), and the published vector layers
    put a tanh around the codes that equation 2 does not have (``squash``). A hidden
    layer of the feed-forward key (``key_units``) is ours, and so are the initial
    weights: evolution starts from zeros, but a gradient finds nothing where all scores
    are small, so queries begin with unit variance and keys with ``key_gain`` times
    that of what they are made from. As a sensory layer it stands directly on the
    observation: ``encoder=identity``.

    Args:
        dim: D, the width of the vectors.
        num_codes: M, the number of codes.
        memory: "lstm", or "none" for the feed-forward variant.
        key_units: units of the LSTM, or of a tanh layer in the feed-forward key; there
            0 stands for no such layer, as published.
        message_dim: d, the width of projected queries and keys.
        position_dim: width of the table of sinusoids.
        frames: frames in a token, oldest first, for the feed-forward key; divides D.
        activation: σ, "tanh" (vectors) or "softmax" over the tokens (patches).
        scale: divide the scores by √d.
        bias: give the projections of queries and keys a bias.
        squash: put a tanh around the codes.
        key_gain: of the initial projection of the keys; large where a token's
            readings are small, as an LSTM's outputs and differences of frames are.
        expected_tokens: multiply the codes, inside ``squash``, by this number over
            that of the tokens present, so that a sum over more of them, as of inputs
            that are there twice, is as large as in training; 0 for no such factor.
        action_dim: A, the width of the previous action.

    Raises:
        InputError: an unknown choice, an LSTM without units or with frames, or frames
            that do not divide D.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: int,
        *,
        num_codes: PositiveInt = 16,
        memory: Literal["lstm", "none"] = "lstm",
        key_units: NonNegativeInt = 8,
        message_dim: PositiveInt = 32,
        position_dim: PositiveInt = 8,
        frames: PositiveInt = 1,
        activation: Literal["tanh", "softmax"] = "tanh",
        scale: bool = True,
        bias: bool = True,
        squash: bool = True,
        key_gain: PositiveFloat = 4.0,
        expected_tokens: NonNegativeInt = 0,
        action_dim: int = 0,
    ) -> None:
        super().__init__(dim, action_dim=action_dim, dim_out=num_codes * dim)
        _check(dim, memory, key_units, frames, activation)
        self.num_codes, self.frames = num_codes, frames
        self.activation, self.squash = activation, squash
        self.expected_tokens = expected_tokens
        self.scale = message_dim**-0.5 if scale else 1.0
        seen = dim if frames == 1 else dim - dim // frames
        self.cell: nn.LSTMCell | None = None
        self.hidden: nn.Linear | None = None
        width = seen + action_dim
        if memory == "lstm":
            self.cell = nn.LSTMCell(width, key_units)
        elif key_units:
            self.hidden = nn.Linear(width, key_units)
        self.key = nn.Linear(key_units or width, message_dim, bias=bias)
        self.query = nn.Linear(position_dim, message_dim, bias=bias)
        # Half of the squares of sines and cosines is what they are on average.
        nn.init.normal_(self.query.weight, std=(2 / position_dim) ** 0.5)
        nn.init.normal_(self.key.weight, std=key_gain * self.key.in_features**-0.5)
        for part in (self.query, self.key) if bias else ():
            nn.init.zeros_(part.bias)
        self.table: Tensor
        table = sinusoids(num_codes, position_dim)
        self.register_buffer("table", table, persistent=False)

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """Hidden and cell state of each token, ``(batch, N, key_units)`` zeros."""
        if self.cell is None:
            return ()
        zeros = self.key.weight.new_zeros(batch, num_tokens, self.cell.hidden_size)
        return zeros, zeros

    def unroll(
        self, x: Tensor, padding: Tensor | None, actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Read T sets of ``(B, T, N, D)``; see `MemoryPooling.unroll`."""
        return self.read(self.fold(), x, padding, actions, memory)

    def attention_weights(
        self, x: Tensor, padding: Tensor | None, actions: Tensor, memory: Memory
    ) -> Tensor:
        """The size of each weight as a share of its code's, ``(B, M, N)``."""
        folded = self.fold()
        keys, _ = self._keys(folded, x, padding, actions, memory)
        sizes = self._attend(folded, keys, padding)[:, -1].transpose(-1, -2).abs()
        least = torch.finfo(sizes.dtype).tiny
        return sizes / sizes.sum(-1, keepdim=True).clamp(min=least)

    def fold(self, parameters: Mapping[str, Tensor] | None = None) -> "Folded":
        """Compute from the weights what can be before anything is seen.

        Args:
            parameters: by name, each with a leading dimension P for a population;
                None for the layer's own.
        """
        own = dict(self.named_parameters()) if parameters is None else parameters
        keys: Layer | None = None
        if self.cell is not None:
            keys = _fold_cell(strip_prefix("cell", own))
        elif self.hidden is not None:
            keys = own["hidden.weight"].mT, own["hidden.bias"]
        queries = self.table @ own["query.weight"].mT
        if "query.bias" in own:
            queries = queries + own["query.bias"][..., None, :]
        queries = self.scale * queries
        # Queries are few and always the same: the keys' projection is theirs first.
        bias = None
        if "key.bias" in own:
            bias = (queries @ own["key.bias"][..., None])[..., 0]
        return Folded(keys, (queries @ own["key.weight"]).mT, bias)

    def read(
        self,
        folded: "Folded",
        x: Tensor,
        padding: Tensor | None,
        actions: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Do as `unroll` with what `fold` returned.

        All arguments may have a leading dimension P, for a population of weights.
        """
        keys, memory = self._keys(folded, x, padding, actions, memory)
        weights = self._attend(folded, keys, padding)
        if self.dim == 1:  # many times faster than that many products with one column
            codes = (weights * x).sum(-2)
        else:
            codes = (weights.transpose(-1, -2) @ x).flatten(-2)
        if self.expected_tokens:
            codes = codes * self._factor(x, padding)
        return tanh(codes) if self.squash else codes, memory

    def _factor(self, x: Tensor, padding: Tensor | None) -> Tensor | float:
        """What ``expected_tokens`` makes of the codes, a number or ``(B, T, 1)``."""
        if padding is None:
            return self.expected_tokens / max(1, x.shape[-2])
        present = (~padding).sum(-1, keepdim=True).clamp(min=1)
        return self.expected_tokens / present.to(x.dtype)

    def _attend(self, folded: "Folded", keys: Tensor, padding: Tensor | None) -> Tensor:
        """σ of the scores, ``(B, T, N, M)``, zero under padding."""
        scores = batched_linear(keys, folded.scores, folded.bias)
        hidden = None if padding is None else padding[..., None]
        if self.activation == "tanh":
            weights = tanh(scores)
        else:
            if hidden is not None:
                # Finite, so that a set without any token has no NaN in its gradient.
                lowest = torch.finfo(scores.dtype).min
                scores = scores.masked_fill(hidden, lowest)
            weights = scores.softmax(-2)
        return weights if hidden is None else weights.masked_fill(hidden, 0.0)

    def _keys(
        self,
        folded: "Folded",
        x: Tensor,
        padding: Tensor | None,
        actions: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """The keys ``(B, T, N, K)`` before their projection."""
        num_tokens = x.shape[-2]
        if self.frames > 1:
            stacked = x.unflatten(-1, (self.frames, -1))
            x = (stacked[..., 1:, :] - stacked[..., :-1, :]).flatten(-2)
        before = actions[..., None, :]
        before = before.expand(*before.shape[:-2], num_tokens, -1)
        readings = torch.cat([x, before], dim=-1)
        if folded.keys is None:
            return readings, memory
        if self.cell is None:
            return tanh(batched_linear(readings, *folded.keys)), memory
        return _run(folded.keys, readings, padding, memory)


class Folded(NamedTuple):
    """Weights of one `AttentionNeuronPooling` or a population, ready for use."""

    keys: Layer | None
    """Of what makes the keys, the LSTM or the hidden layer; None for neither."""
    scores: Tensor
    """``(*P, K, M)`` from a key to its scores with all queries."""
    bias: Tensor | None
    """``(*P, M)`` of the scores."""


def sinusoids(rows: int, width: int) -> Tensor:
    """The table ``(rows, width)``, sine and cosine taking turns along a row.

    Source: Vaswani et al. (2017), section 3.5.
    """
    column = torch.arange(width, dtype=torch.float64)
    row = torch.arange(rows, dtype=torch.float64)[:, None]
    angles = row / 10_000 ** (2 * (column // 2) / width)
    table = torch.where(column % 2 == 0, angles.sin(), angles.cos())
    return table.to(torch.get_default_dtype())


def _fold_cell(cell: Mapping[str, Tensor]) -> Layer:
    """One layer from input and hidden state to the gates, twice that of the update.

    So one logistic function serves all gates: at 2z it makes the update's tanh of z.
    """
    weight = torch.cat([cell["weight_ih"], cell["weight_hh"]], dim=-1)
    bias = cell["bias_ih"] + cell["bias_hh"]
    units = bias.shape[-1] // 4
    factor = bias.new_tensor([1.0, 1.0, 2.0, 1.0]).repeat_interleave(units)
    return (weight * factor[:, None]).mT, bias * factor


def _run(
    gates: Layer, inputs: Tensor, padding: Tensor | None, memory: Memory
) -> tuple[Tensor, Memory]:
    """Feed ``(B, T, N, I)`` to one LSTM a token; padded tokens keep their memory."""
    if torch.is_grad_enabled() and not is_transformed() and inputs.dim() == 4:
        return _run_to_learn(gates, inputs, padding, memory)
    hidden, state = memory
    outputs = []
    for t in range(inputs.shape[-3]):
        seen = torch.cat([inputs[..., t, :, :], hidden], dim=-1)
        opened = batched_linear(seen, *gates).sigmoid()
        let_in, forget, update, let_out = opened.chunk(4, dim=-1)
        new_state = torch.addcmul(forget * state - let_in, let_in, update, value=2)
        new_hidden = let_out * tanh(new_state)
        if padding is not None:
            held = padding[..., t, :, None]
            new_hidden = torch.where(held, hidden, new_hidden)
            new_state = torch.where(held, state, new_state)
        hidden, state = new_hidden, new_state
        outputs.append(hidden)
    return torch.stack(outputs, dim=-3), (hidden, state)


def _run_to_learn(
    gates: Layer, inputs: Tensor, padding: Tensor | None, memory: Memory
) -> tuple[Tensor, Memory]:
    """The same for one set of weights, whose gradient is wanted: three times faster."""
    batch, _, num_tokens, width = inputs.shape
    weight, bias = gates[0].mT, gates[1]
    of_input, of_hidden = weight.split([width, weight.shape[1] - width], dim=1)
    rows = inputs.permute(1, 3, 0, 2).flatten(2)
    held = None if padding is None else padding.transpose(0, 1).flatten(1)
    hidden, state = (part.permute(2, 0, 1).flatten(1) for part in memory)
    keys, state = lstm_sequence(
        rows, Gates(of_input, of_hidden, bias), hidden, state, held
    )
    keys = keys.unflatten(2, (batch, num_tokens))
    state = state.unflatten(1, (batch, num_tokens)).permute(1, 2, 0)
    return keys.permute(2, 0, 3, 1), (keys[-1].permute(1, 2, 0), state)


def _check(dim: int, memory: str, key_units: int, frames: int, activation: str) -> None:
    for key, value, choices in (
        ("memory", memory, ("lstm", "none")),
        ("activation", activation, ("tanh", "softmax")),
    ):
        if value not in choices:
            raise InputError(
                f"pooling.{key}: expected {' or '.join(choices)}, got {value!r}"
            )
    if frames < 1 or dim % frames:
        raise InputError(
            f"pooling.frames: expected a divisor of the width {dim}, got {frames}"
        )
    if memory == "lstm" and key_units < 1:
        raise InputError(
            f"pooling.key_units: expected at least 1 for an LSTM, got {key_units}"
        )
    if memory == "lstm" and frames > 1:
        raise InputError(
            "pooling.frames: an LSTM reads one frame after the other; expected 1, "
            f"got {frames}"
        )
