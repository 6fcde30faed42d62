"""An LSTM over a sequence, with its gradient written out.

With gates ``i, f, u, o = σ(U x_t + W h_{t-1} + b)``, the update's rows of U, W and b
doubled so that ``tanh(z) = 2 σ(2 z) - 1``,

    c_t = f c_{t-1} + i (2 u - 1),   h_t = o tanh(c_t).

Autograd would note some ten operations a step and take memory for each. Here a step is
one small product and a few operations in place, forwards and back; what the gradient
needs beside is computed for as many steps at once as fit the cache. Rows are the last
dimension, so that each gate is one contiguous block of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 16
"""Numbers of all gates that are handled at once, 256 KB of float32."""


class Gates(NamedTuple):
    """From input and hidden state to the four gates.

    Attributes:
        of_input: ``(4 K, I)``, U.
        of_hidden: ``(4 K, K)``, W.
        bias: ``(4 K,)``, b.
    """

    of_input: Tensor
    of_hidden: Tensor
    bias: Tensor


def lstm_sequence(
    inputs: Tensor, gates: Gates, hidden: Tensor, state: Tensor, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run an LSTM of K units over T steps of R rows.

    Args:
        inputs: ``(T, I, R)``.
        gates: the weights.
        hidden: ``(K, R)``, before the first step.
        state: ``(K, R)``, of the cells, before the first step.
        held: ``(T, R)`` bool, rows that keep their memory in a step; None: none do.

    Returns:
        The hidden states ``(T, K, R)`` and the last cells' state ``(K, R)``. A gradient
        of the gradient is that of `plain_lstm_sequence`.
    """
    own = gates.bias.dtype
    parts = (inputs.to(own), *gates, hidden.to(own), state.to(own), held)
    # Sums over many steps need more digits than mixed precision would leave them.
    with torch.autocast(inputs.device.type, enabled=False):
        result: tuple[Tensor, Tensor] = _LSTMSequence.apply(*parts)
    return result


def plain_lstm_sequence(
    inputs: Tensor, gates: Gates, hidden: Tensor, state: Tensor, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `lstm_sequence` by its definition, differentiable any number of times."""
    from_inputs = gates.of_input @ inputs + gates.bias[:, None]
    hiddens = []
    for t, from_input in enumerate(from_inputs):
        opened = (from_input + gates.of_hidden @ hidden).sigmoid()
        let_in, forget, update, let_out = opened.chunk(4)
        new_state = forget * state + let_in * (2 * update - 1)
        new_hidden = let_out * new_state.tanh()
        if held is not None:
            new_state = torch.where(held[t], state, new_state)
            new_hidden = torch.where(held[t], hidden, new_hidden)
        hidden, state = new_hidden, new_state
        hiddens.append(hidden)
    return torch.stack(hiddens), state


class _LSTMSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        of_input: Tensor,
        of_hidden: Tensor,
        bias: Tensor,
        hidden: Tensor,
        state: Tensor,
        held: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        steps, units = len(inputs), len(state)
        gates = of_input @ inputs
        gates += bias[:, None]
        hiddens = hidden.new_empty(steps + 1, *hidden.shape)
        states, squashed = torch.empty_like(hiddens), torch.empty_like(hiddens[1:])
        hiddens[0], states[0] = hidden, state
        for t in range(steps):
            opened, new = gates[t], states[t + 1]
            opened.addmm_(of_hidden, hiddens[t]).sigmoid_()
            let_in, forget, update, let_out = opened.split(units)
            torch.mul(forget, states[t], out=new)
            new.addcmul_(let_in, update, value=2).sub_(let_in)
            torch.tanh(new, out=squashed[t])
            torch.mul(let_out, squashed[t], out=hiddens[t + 1])
            if held is not None:
                torch.where(held[t], states[t], new, out=new)
                torch.where(held[t], hiddens[t], hiddens[t + 1], out=hiddens[t + 1])
        ctx.save_for_backward(
            inputs,
            of_input,
            of_hidden,
            bias,
            hidden,
            state,
            held,
            gates,
            hiddens,
            states,
            squashed,
        )
        return hiddens[1:].clone(), states[-1].clone()

    @staticmethod
    def backward(
        ctx: Any, for_hiddens: Tensor, for_last: Tensor
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(for_last.device.type, enabled=False):
            if torch.is_grad_enabled():  # create_graph=True
                return _plain_gradients(ctx.saved_tensors[:7], for_hiddens, for_last)
            return _gradients(ctx, for_hiddens, for_last)


def _plain_gradients(
    given: Sequence[Any], for_hiddens: Tensor, for_last: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of what `_LSTMSequence` was given, differentiable again."""
    *tensors, held = given
    # Views, so that one tensor in two roles is counted once in each.
    inputs, *weights, hidden, state = parts = [part.view_as(part) for part in tensors]
    results = plain_lstm_sequence(inputs, Gates(*weights), hidden, state, held)
    wanted = [part for part in parts if part.requires_grad]
    found = iter(
        torch.autograd.grad(results, wanted, (for_hiddens, for_last), create_graph=True)
    )
    return (*(next(found) if part.requires_grad else None for part in parts), None)


def _gradients(
    ctx: Any, for_hiddens: Tensor, for_last: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of what `_LSTMSequence` was given."""
    inputs, of_input, of_hidden, *_, held, gates, hiddens, states, squashed = (
        ctx.saved_tensors
    )
    slopes = torch.empty_like(gates)
    back = of_hidden.mT.contiguous()
    for_state, for_hidden = for_last.clone(), torch.zeros_like(for_last)
    size = max(1, PIECE // max(1, gates[0].numel()))
    for first in reversed(range(0, len(gates), size)):
        piece = slice(first, first + size)
        keeps = None if held is None else held[piece]
        through = _slopes(
            gates[piece], states[:-1][piece], squashed[piece], keeps, slopes[piece]
        )
        forget = gates[piece, len(for_last) : 2 * len(for_last)]
        for_hidden = _back(
            for_hiddens[piece],
            (slopes[piece], through, forget, back, keeps),
            for_hidden,
            for_state,
        )
    for_inputs = of_input.mT @ slopes if ctx.needs_input_grad[0] else None
    of_inputs = torch.bmm(slopes, inputs.mT).sum(0)
    of_hiddens = torch.bmm(slopes, hiddens[:-1].mT).sum(0)
    of_bias = slopes.sum((0, 2))
    return for_inputs, of_inputs, of_hiddens, of_bias, for_hidden, for_state, None


def _slopes(
    gates: Tensor, before: Tensor, squashed: Tensor, held: Tensor | None, out: Tensor
) -> Tensor:
    """Write what a gate's logits are worth to c_t, and the last gate's to h_t.

    Args:
        gates: ``(S, 4 K, R)``.
        before: ``(S, K, R)``, the cells' state before each step.
        squashed: ``(S, K, R)``, its tanh after it.
        held: ``(S, R)`` or None.
        out: ``(S, 4 K, R)``.

    Returns:
        ``(S, K, R)``, what c_t is worth to h_t.
    """
    units = before.shape[1]
    let_in, _, update, let_out = gates.split(units, dim=1)
    torch.mul(gates, 1 - gates, out=out)
    for_in, for_forget, for_update, for_out = out.split(units, dim=1)
    for_in.mul_(2 * update - 1)
    for_forget.mul_(before)
    for_update.mul_(2 * let_in)
    for_out.mul_(squashed)
    through = let_out * (1 - squashed.square())
    if held is not None:
        out.masked_fill_(held[:, None], 0.0)
        through.masked_fill_(held[:, None], 0.0)
    return through


def _back(
    for_hiddens: Tensor,
    worth: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    for_hidden: Tensor,
    for_state: Tensor,
) -> Tensor:
    """Go back through some steps; slopes become gradients in place.

    Args:
        for_hiddens: ``(S, K, R)``, the gradient of what was returned.
        worth: slopes, what c_t is worth to h_t, the forget gates, the transpose of W,
            and the rows that were held.
        for_hidden: ``(K, R)``, the gradient that later steps have for h_t.
        for_state: ``(K, R)``, likewise for c_t; changed in place.

    Returns:
        The gradient for the hidden state before these steps.
    """
    slopes, through, forget, back, held = worth
    units = len(for_state)
    for t in reversed(range(len(slopes))):
        for_hidden = for_hidden + for_hiddens[t]
        for_state.addcmul_(for_hidden, through[t])
        slopes[t, : 3 * units].view(3, units, -1).mul_(for_state)
        slopes[t, 3 * units :].mul_(for_hidden)
        if held is None:
            for_state *= forget[t]
            for_hidden = back @ slopes[t]
        else:
            for_state *= torch.where(held[t], 1.0, forget[t])
            for_hidden = (for_hidden * held[t]).addmm_(back, slopes[t])
    return for_hidden
