"""An LSTM over a sequence, with a hand-written gradient.

    i, f, u, o = σ(U x_t + W h_{t-1} + b)
    c_t = f c_{t-1} + i (2 u - 1)
    h_t = o tanh(c_t)

The update's rows of U, W and b are doubled, so that one logistic function serves all
gates: tanh(z) = 2 σ(2 z) - 1.

Autograd would record about ten operations a step and allocate memory for each. Here a
step is one small product and a few operations in place, forward and backward; the
derivatives of the gates are computed for as many steps at once as fit the cache. Rows
(tokens of a batch) are the last dimension, so that each gate is a contiguous block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_pool.kernels.functional import input_gradients

CHUNK = 1 << 16
"""Gate values that are handled at once, 256 KB of float32."""


class Gates(NamedTuple):
    """Weights from input and hidden state to the four gates."""

    of_input: Tensor
    """``(4 K, I)``, U."""
    of_hidden: Tensor
    """``(4 K, K)``, W."""
    bias: Tensor
    """``(4 K,)``, b."""


def lstm_sequence(
    inputs: Tensor, gates: Gates, hidden: Tensor, state: Tensor, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run an LSTM of K units over T steps of R rows.

    Args:
        inputs: ``(T, I, R)``.
        gates: the weights.
        hidden: ``(K, R)``, the hidden state before the first step.
        state: ``(K, R)``, the cell state before the first step.
        held: ``(T, R)`` bool, rows that keep their memory in a step; None for none.

    Returns:
        The hidden states ``(T, K, R)`` and the last cell state ``(K, R)``. Second-order
        gradients are computed by `plain_lstm_sequence`.
    """
    dtype = gates.bias.dtype
    parts = (inputs.to(dtype), *gates, hidden.to(dtype), state.to(dtype), held)
    # Sums over many steps need more digits than mixed precision has.
    with torch.autocast(inputs.device.type, enabled=False):
        return _LSTMSequence.apply(*parts)


def plain_lstm_sequence(
    inputs: Tensor, gates: Gates, hidden: Tensor, state: Tensor, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `lstm_sequence` by its definition, differentiable any number of times."""
    from_inputs = gates.of_input @ inputs + gates.bias[:, None]
    hiddens = []
    for t, from_input in enumerate(from_inputs):
        i, f, u, o = (from_input + gates.of_hidden @ hidden).sigmoid().chunk(4)
        new_state = f * state + i * (2 * u - 1)
        new_hidden = o * new_state.tanh()
        if held is not None:
            new_state = torch.where(held[t], state, new_state)
            new_hidden = torch.where(held[t], hidden, new_hidden)
        hidden, state = new_hidden, new_state
        hiddens.append(hidden)
    return torch.stack(hiddens), state


class _LSTMSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, of_input, of_hidden, bias, hidden, state, held = arguments
        steps, units = len(inputs), len(state)
        # Compute the inputs' share of the gates for all steps at once.
        gates = of_input @ inputs
        gates += bias[:, None]
        # Keep all states for the backward pass.
        hiddens = hidden.new_empty(steps + 1, *hidden.shape)
        states, squashed = torch.empty_like(hiddens), torch.empty_like(hiddens[1:])
        hiddens[0], states[0] = hidden, state
        for t in range(steps):
            # Take one step: gates, then the cell state, then the hidden state.
            gate, new = gates[t], states[t + 1]
            gate.addmm_(of_hidden, hiddens[t]).sigmoid_()
            i, f, u, o = gate.split(units)
            torch.mul(f, states[t], out=new)
            # Add i (2 u - 1).
            new.addcmul_(i, u, value=2).sub_(i)
            torch.tanh(new, out=squashed[t])
            torch.mul(o, squashed[t], out=hiddens[t + 1])
            # Held tokens keep both states.
            if held is not None:
                torch.where(held[t], states[t], new, out=new)
                torch.where(held[t], hiddens[t], hiddens[t + 1], out=hiddens[t + 1])
        ctx.save_for_backward(*arguments, gates, hiddens, states, squashed)
        # Copies, since the saved tensors must not change with the results.
        return hiddens[1:].clone(), states[-1].clone()

    @staticmethod
    def backward(
        ctx: Any, for_hiddens: Tensor, for_last: Tensor
    ) -> tuple[Tensor | None, ...]:
        with torch.autocast(for_last.device.type, enabled=False):
            if not torch.is_grad_enabled():
                return _gradients(ctx, for_hiddens, for_last)
            # With create_graph=True the gradients have to be differentiable in turn.
            *tensors, held = ctx.saved_tensors[:7]
            # Views, so that a tensor passed as two arguments has a gradient for each.
            parts = [part.view_as(part) for part in tensors]
            inputs, *weights, hidden, state = parts
            results = plain_lstm_sequence(inputs, Gates(*weights), hidden, state, held)
            for_results = (for_hiddens, for_last)
            return *input_gradients(
                results, parts, for_results, create_graph=True
            ), None


def _gradients(
    ctx: Any, for_hiddens: Tensor, for_last: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `_LSTMSequence`."""
    inputs, of_input, of_hidden, *_, held, gates, hiddens, states, squashed = (
        ctx.saved_tensors
    )
    slopes, units = torch.empty_like(gates), len(for_last)
    forget = gates[:, units : 2 * units]
    # Transpose once, for a product in each step.
    back = of_hidden.mT.contiguous()
    for_state, for_hidden = for_last.clone(), torch.zeros_like(for_last)
    # Backpropagate through time, chunk by chunk from the last step to the first.
    size = max(1, CHUNK // max(1, gates[0].numel()))
    for first in reversed(range(0, len(gates), size)):
        chunk = slice(first, first + size)
        kept = None if held is None else held[chunk]
        through = _local_derivatives(
            gates[chunk], states[:-1][chunk], squashed[chunk], kept, slopes[chunk]
        )
        for t in reversed(range(first, first + len(through))):
            # Add the gradient of this step's output to that from later steps.
            for_hidden = for_hidden + for_hiddens[t]
            for_state.addcmul_(for_hidden, through[t - first])
            # Turn the derivatives by the gates' logits into gradients, in place.
            slopes[t, : 3 * units].view(3, units, -1).mul_(for_state)
            slopes[t, 3 * units :].mul_(for_hidden)
            if held is None:
                for_state *= forget[t]
                for_hidden = back @ slopes[t]
            else:
                # A held token passes both gradients on to the step before.
                for_state *= torch.where(held[t], 1.0, forget[t])
                for_hidden = (for_hidden * held[t]).addmm_(back, slopes[t])
    # `slopes` now holds the gradients of the gates' logits in all steps.
    for_inputs = of_input.mT @ slopes if ctx.needs_input_grad[0] else None
    of_inputs = torch.bmm(slopes, inputs.mT).sum(0)
    of_hiddens = torch.bmm(slopes, hiddens[:-1].mT).sum(0)
    of_bias = slopes.sum((0, 2))
    return for_inputs, of_inputs, of_hiddens, of_bias, for_hidden, for_state, None


def _local_derivatives(
    gates: Tensor,
    prev_state: Tensor,
    squashed: Tensor,
    held: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Compute the derivatives within each of S steps.

    Args:
        gates: ``(S, 4 K, R)``.
        prev_state: ``(S, K, R)``, the cell state before each step.
        squashed: ``(S, K, R)``, tanh of the cell state after each step.
        held: ``(S, R)`` or None.
        out: ``(S, 4 K, R)``, where to write the derivatives of c_t by the logits of
            i, f and u, and of h_t by the logits of o.

    Returns:
        ``(S, K, R)``, the derivative of h_t by c_t.
    """
    units = prev_state.shape[1]
    i, _, u, o = gates.split(units, dim=1)
    torch.mul(gates, 1 - gates, out=out)  # the logistic function's derivative
    # Multiply by what each gate scales; u enters as 2 u - 1.
    by_i, by_f, by_u, by_o = out.split(units, dim=1)
    by_i.mul_(2 * u - 1)
    by_f.mul_(prev_state)
    by_u.mul_(2 * i)
    by_o.mul_(squashed)
    through = o * (1 - squashed.square())
    # A held token passes nothing through its gates.
    if held is not None:
        out.masked_fill_(held[:, None], 0.0)
        through.masked_fill_(held[:, None], 0.0)
    return through
