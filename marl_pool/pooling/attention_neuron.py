"""AttentionNeuron: fixed queries that attend to sensory neurons, one per token."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import (
    Layer,
    batched_linear,
    is_transformed,
    masked_softmax,
    strip_prefix,
    tanh,
)
from marl_pool.kernels.lstm_sequence import Gates, lstm_sequence
from marl_pool.options.types import (
    Extent,
    PositiveFloat,
    Repeats,
    Size,
    SizeOrZero,
    TableSize,
)
from marl_pool.pooling.base import Memory, MemoryPooling
from marl_pool.tokens import Mask
from marl_pool.utils.errors import InputError


class AttentionNeuronPooling(MemoryPooling):
    r"""M codes, each a sum over the tokens, weighted by keys with a memory.

    .. math::
        k_t^i = f_k(o_t^i, a_{t-1}), \qquad
        m_t = \sigma\left(\frac{Q W_q\,(K_t W_k)^\top}{\sqrt{d}}\right) V_t

    Each token is a *sensory neuron* that does not know which sensor it reads: all share
    the same weights. Its key :math:`k_t^i` is made from its recent readings and the
    previous action, by an LSTM whose state belongs to the token, or from frames stacked
    in its features: the frame itself if there is one, else the differences of
    consecutive frames. Its value is the reading :math:`o_t^i`. Q is a fixed table of
    sinusoids, a row for each code. So the codes have an order; the tokens may change
    theirs even within an episode. A token that is padded for some steps (a failed
    sensor) keeps its memory.

    Shapes: ``(B, T, N, D)`` to ``(B, T, M D)`` by `unroll`; when called, ``(B, N, D)``
    to ``(B, M D)``. Zero for an empty set.

    Source: Tang and Ha (2021), *The Sensory Neuron as a Transformer*,
    https://arxiv.org/abs/2109.02869, equations 1 and 2, sections 3.2 and 3.3, and the
    published code, whose CartPole layer has neither the scale nor biases, and whose
    vector layers apply a tanh to the codes (``squash``) that equation 2 lacks. Added
    here: a hidden layer of the feed-forward key, and larger initial weights, since
    gradients vanish where all scores are small: projected queries start with unit
    variance and projected keys with ``key_gain ** 2`` times the mean square of their
    input.

    Example:
        >>> pool = AttentionNeuronPooling(1, num_codes=16, action_dim=2)
        >>> x = torch.randn(3, 7, 5, 1)  # 3 episodes, 7 steps, 5 sensors
        >>> prev_actions = torch.zeros(3, 7, 2)
        >>> memory = pool.initial_memory(batch=3, num_tokens=5)
        >>> codes, memory = pool.unroll(x, None, prev_actions, memory)
        >>> codes.shape
        torch.Size([3, 7, 16])

    Args:
        num_codes: M, the number of codes.
        memory: "lstm", or "none" for the feed-forward variant.
        key_units: units of the LSTM, or of a tanh layer in the feed-forward key; 0 for
            no such layer.
        message_dim: d, the width of projected queries and keys.
        position_dim: width of the table of sinusoids.
        frames: number of frames in a token, oldest first, for the feed-forward key; a
            divisor of D.
        activation: σ, "tanh" (vectors) or "softmax" over the tokens (patches).
        scale: divide the scores by √d.
        bias: give the projections of queries and keys a bias.
        squash: apply tanh to the codes.
        key_gain: gain of the initial projection of the keys; large where a token's
            readings are small, as an LSTM's outputs and differences of frames are.
        expected_tokens: multiply the codes, before ``squash``, by this number over the
            number of tokens present, so that a sum over more tokens has the same size
            as in training; 0 for no factor.
        action_dim: A, the width of the previous action.
    """

    keeps_initial_weights = True

    def __init__(
        self,
        dim: Extent,
        *,
        num_codes: TableSize = 16,
        memory: Literal["lstm", "none"] = "lstm",
        key_units: SizeOrZero = 8,
        message_dim: Size = 32,
        position_dim: TableSize = 8,
        frames: Repeats = 1,
        activation: Literal["tanh", "softmax"] = "tanh",
        scale: bool = True,
        bias: bool = True,
        squash: bool = True,
        key_gain: PositiveFloat = 4.0,
        expected_tokens: SizeOrZero = 0,
        action_dim: Extent = 0,
    ) -> None:
        super().__init__(dim, action_dim)
        self.dim_out = num_codes * dim
        if dim % frames:
            raise InputError(
                f"pooling.frames: expected a divisor of the width {dim}, got {frames}"
            )
        if memory == "lstm" and frames > 1:
            raise InputError(
                "pooling.frames: an LSTM reads one frame at a time; expected 1, "
                f"got {frames}"
            )
        if memory == "lstm" and not key_units:
            raise InputError(
                "pooling.key_units: expected at least 1 for an LSTM, got 0"
            )
        self.num_codes, self.frames, self.squash = num_codes, frames, squash
        self.activation, self.expected_tokens = activation, expected_tokens
        self.scale = message_dim**-0.5 if scale else 1.0
        # Stacked frames are read as differences of consecutive ones.
        reading_dim = dim if frames == 1 else dim - dim // frames
        width, recurrent = reading_dim + action_dim, memory == "lstm"
        # Keys come from an LSTM for each token, a hidden layer or the readings.
        self.cell = nn.LSTMCell(width, key_units) if recurrent else None
        has_layer = key_units and not recurrent
        self.hidden = nn.Linear(width, key_units) if has_layer else None
        self.key = nn.Linear(key_units or width, message_dim, bias=bias)
        self.query = nn.Linear(position_dim, message_dim, bias=bias)
        # The mean square of sines and cosines is one half.
        nn.init.normal_(self.query.weight, std=(2 / position_dim) ** 0.5)
        nn.init.normal_(self.key.weight, std=key_gain * self.key.in_features**-0.5)
        for part in (self.query, self.key) if bias else ():
            nn.init.zeros_(part.bias)
        # Queries come from fixed encodings of the codes' indices.
        self.table: Tensor
        table = sinusoids(num_codes, position_dim)
        self.register_buffer("table", table, persistent=False)

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        if self.cell is None:
            return ()
        zeros = self.key.weight.new_zeros(batch, num_tokens, self.cell.hidden_size)
        return zeros, zeros

    @override
    def unroll(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        return self.unroll_folded(self.fold(), x, padding, prev_actions, memory)

    @override
    def attention_weights(
        self, x: Tensor, padding: Mask, prev_actions: Tensor, memory: Memory
    ) -> Tensor:
        """Return absolute weights, each code's normalized to sum 1, ``(B, M, N)``."""
        folded = self.fold()
        keys, _ = self._keys(folded, x, padding, prev_actions, memory)
        sizes = self._attend(folded, keys, padding)[:, -1].transpose(-1, -2).abs()
        least = torch.finfo(sizes.dtype).tiny
        return sizes / sizes.sum(-1, keepdim=True).clamp(min=least)

    def fold(self, parameters: Mapping[str, Tensor] | None = None) -> "FoldedWeights":
        """Combine weights whose products do not depend on the input.

        ``parameters`` are a population's, ``(P, …)`` each, by name; None for this
        layer's.
        """
        weights = dict(self.named_parameters()) if parameters is None else parameters
        # From readings to keys: the LSTM, the hidden layer, or neither.
        keys: Layer | None = None
        if self.cell is not None:
            keys = _fold_cell(strip_prefix("cell", weights))
        elif self.hidden is not None:
            keys = weights["hidden.weight"].mT, weights["hidden.bias"]
        # Compute the queries of the codes, scaled in advance.
        queries = self.table @ weights["query.weight"].mT
        if "query.bias" in weights:
            queries = queries + weights["query.bias"][..., None, :]
        queries = self.scale * queries
        # The queries are fixed, so Q W_q W_kᵀ is one matrix: fold the keys' projection
        # into the queries instead of projecting each token's key.
        bias = None
        if "key.bias" in weights:
            bias = (queries @ weights["key.bias"][..., None])[..., 0]
        return FoldedWeights(keys, (queries @ weights["key.weight"]).mT, bias)

    def unroll_folded(
        self,
        folded: "FoldedWeights",
        x: Tensor,
        padding: Mask,
        prev_actions: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Compute `unroll` with weights from `fold`; all may have a leading P."""
        keys, memory = self._keys(folded, x, padding, prev_actions, memory)
        weights = self._attend(folded, keys, padding)
        if self.dim == 1:  # many times faster than products with one column each
            codes = (weights * x).sum(-2)
        else:
            codes = (weights.transpose(-1, -2) @ x).flatten(-2)
        if self.expected_tokens:
            present: Tensor | int = max(1, x.shape[-2])
            if padding is not None:
                present = (~padding).sum(-1, keepdim=True).clamp(min=1).to(x.dtype)
            codes = codes * (self.expected_tokens / present)
        return tanh(codes) if self.squash else codes, memory

    def _attend(self, folded: "FoldedWeights", keys: Tensor, padding: Mask) -> Tensor:
        """Return σ of the scores, ``(B, T, N, M)``, zero under padding."""
        scores = batched_linear(keys, folded.scores, folded.bias)
        ignore = None if padding is None else padding[..., None]
        if self.activation == "softmax":
            return masked_softmax(scores, ignore, dim=-2)
        weights = tanh(scores)
        return weights if ignore is None else weights.masked_fill(ignore, 0.0)

    def _keys(
        self,
        folded: "FoldedWeights",
        x: Tensor,
        padding: Mask,
        prev_actions: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Return the keys ``(B, T, N, K)`` before their projection, and the memory."""
        if self.frames > 1:
            x = x.unflatten(-1, (self.frames, -1)).diff(dim=-2).flatten(-2)
        # Every token reads the same previous action.
        actions = prev_actions[..., None, :].expand(*x.shape[:-1], -1)
        readings = torch.cat([x, actions], dim=-1)
        if folded.keys is None:
            return readings, memory
        if self.cell is None:
            return tanh(batched_linear(readings, *folded.keys)), memory
        return _run_cell(folded.keys, readings, padding, memory)


class FoldedWeights(NamedTuple):
    """Combined weights of an `AttentionNeuronPooling`, or of a population of P."""

    keys: Layer | None
    """The LSTM's gates or the hidden layer; None if there is neither."""
    scores: Tensor
    """``(*P, K, M)``, from a key to its scores with all queries."""
    bias: Tensor | None
    """``(*P, M)``, the bias of the scores."""


def sinusoids(rows: int, width: int) -> Tensor:
    """Return the table of positions ``(rows, width)``, sine and cosine alternating.

    Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762, section 3.5.
    """
    column = torch.arange(width, dtype=torch.float64)
    row = torch.arange(rows, dtype=torch.float64)[:, None]
    angles = row / 10_000 ** (2 * (column // 2) / width)
    table = torch.where(column % 2 == 0, angles.sin(), angles.cos())
    return table.to(torch.get_default_dtype())


def _fold_cell(cell: Mapping[str, Tensor]) -> Layer:
    """Combine an LSTM's weights in one layer from ``[input; hidden]`` to the gates.

    The rows of the update gate are doubled, so that one logistic function serves all
    gates: tanh(z) = 2 σ(2 z) - 1.
    """
    weight = torch.cat([cell["weight_ih"], cell["weight_hh"]], dim=-1)
    bias = cell["bias_ih"] + cell["bias_hh"]
    units = bias.shape[-1] // 4
    factor = bias.new_ones(4 * units)
    factor[2 * units : 3 * units] = 2
    return (weight * factor[:, None]).mT, bias * factor


def _run_cell(
    gates: Layer, inputs: Tensor, padding: Mask, memory: Memory
) -> tuple[Tensor, Memory]:
    """Run an LSTM for each token of ``(B, T, N, I)``; padded ones keep their memory."""
    # In training, use a kernel with an efficient gradient.
    if torch.is_grad_enabled() and not is_transformed() and inputs.dim() == 4:
        return _run_cell_with_gradient(gates, inputs, padding, memory)
    hidden, state = memory
    outputs = []
    for t in range(inputs.shape[-3]):
        joined = torch.cat([inputs[..., t, :, :], hidden], dim=-1)
        i, f, u, o = batched_linear(joined, *gates).sigmoid().chunk(4, dim=-1)
        new_state = torch.addcmul(f * state - i, i, u, value=2)  # f c + i (2 u - 1)
        new_hidden = o * tanh(new_state)
        if padding is not None:
            held = padding[..., t, :, None]
            new_hidden = torch.where(held, hidden, new_hidden)
            new_state = torch.where(held, state, new_state)
        hidden, state = new_hidden, new_state
        outputs.append(hidden)
    return torch.stack(outputs, dim=-3), (hidden, state)


def _run_cell_with_gradient(
    gates: Layer, inputs: Tensor, padding: Mask, memory: Memory
) -> tuple[Tensor, Memory]:
    """Run one set of weights with a hand-written gradient, three times faster."""
    batch, _, num_tokens, width = inputs.shape
    weight, bias = gates[0].mT, gates[1]
    of_input, of_hidden = weight.split([width, weight.shape[1] - width], dim=1)
    # The kernel has time first and all tokens of the batch last.
    rows = inputs.permute(1, 3, 0, 2).flatten(2)
    held = None if padding is None else padding.transpose(0, 1).flatten(1)
    hidden, state = (part.permute(2, 0, 1).flatten(1) for part in memory)
    keys, state = lstm_sequence(
        rows, Gates(of_input, of_hidden, bias), hidden, state, held
    )
    keys = keys.unflatten(2, (batch, num_tokens))
    state = state.unflatten(1, (batch, num_tokens)).permute(1, 2, 0)
    return keys.permute(2, 0, 3, 1), (keys[-1].permute(1, 2, 0), state)
