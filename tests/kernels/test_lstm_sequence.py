"""The LSTM over a sequence, against torch's cell and numerical gradients."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from marl_pool.kernels.lstm_sequence import Gates, lstm_sequence


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@hypothesis.given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.booleans()
)
def test_it_is_torchs_cell_step_by_step(steps, units, rows, holds):
    torch.manual_seed(steps + 7 * units + 31 * rows)
    cell = nn.LSTMCell(3, units, dtype=torch.float64)
    inputs, memory = random(steps, rows, 3), (random(rows, units), random(rows, units))
    held = torch.rand(steps, rows) < 0.3 if holds else None
    # Torch's order of gates is in, forget, update, out; ours doubles the update's.
    factor = torch.tensor([1.0, 1.0, 2.0, 1.0]).repeat_interleave(units)[:, None]
    biases = (cell.bias_ih + cell.bias_hh) * factor[:, 0]
    gates = Gates(*(w * factor for w in (cell.weight_ih, cell.weight_hh)), biases)
    start = [part.mT.contiguous() for part in memory]
    outputs, last = lstm_sequence(inputs.mT, gates, *start, held)

    hidden, state = memory
    for t in range(steps):
        new = cell(inputs[t], (hidden, state))
        if held is None:
            hidden, state = new
        else:
            keep = held[t][:, None]
            hidden = torch.where(keep, hidden, new[0])
            state = torch.where(keep, state, new[1])
        assert outputs[t].mT.allclose(hidden, atol=1e-12)
    assert last.mT.allclose(state, atol=1e-12)


def random_arguments() -> list[torch.Tensor]:
    """Inputs, weights and memory of four steps, two units and three rows."""
    shapes = ((4, 5, 3), (8, 5), (8, 2), (8,), (2, 3), (2, 3))
    return [random(*shape) for shape in shapes]


@pytest.mark.parametrize("holds", [False, True])
def test_gradients_pass_gradcheck(monkeypatch, holds):
    torch.manual_seed(0)
    rows = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    held = rows if holds else None
    monkeypatch.setattr(
        "marl_pool.kernels.lstm_sequence.CHUNK", 3 * 8 * 3
    )  # and one more

    def run(inputs, *arguments):
        return lstm_sequence(inputs, Gates(*arguments[:3]), *arguments[3:], held)

    parts = random_arguments()
    assert torch.autograd.gradcheck(run, [part.requires_grad_() for part in parts])


def test_autocast_changes_nothing():
    parts = [part.float().requires_grad_() for part in random_arguments()]

    def run():
        outputs, last = lstm_sequence(parts[0], Gates(*parts[1:4]), *parts[4:], None)
        return outputs, torch.autograd.grad(outputs.sum() + last.sum(), parts)

    expected, gradients = run()
    with torch.autocast("cpu", torch.bfloat16):
        outputs, mixed_gradients = run()
    assert outputs.equal(expected)
    assert all(map(torch.equal, gradients, mixed_gradients))


def test_arguments_are_not_modified():
    parts = random_arguments()
    copies = [part.clone() for part in parts]
    outputs, last = lstm_sequence(parts[0], Gates(*parts[1:4]), *parts[4:], None)
    outputs += 1
    last += 1
    assert all(map(torch.equal, parts, copies))
