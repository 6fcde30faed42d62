"""Benchmark of a SWARM layer, compared with a loop of torch's LSTM cells."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.common import Row, Size, compare, taking_turns
from marl_pool.encoders.swarm import SwarmLayer

UNITS, ITERATIONS, ENTITIES, SETS, DIM = 192, 10, 500, 10, 2


class CellLoop(nn.Module):
    """Literal implementation of SWARM's section 3 with `nn.LSTMCell`."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(DIM + UNITS, UNITS)
        self.output = nn.Linear(2 * UNITS, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, N, DIM)`` to ``(B, N, DIM)``."""
        hidden = memory = x.new_zeros(x.shape[0] * x.shape[1], UNITS)
        for _ in range(ITERATIONS):
            by_entity = hidden.unflatten(0, x.shape[:2])
            pooled = by_entity.mean(1, keepdim=True).expand_as(by_entity)
            inputs = torch.cat([x, pooled], -1).flatten(0, 1)
            hidden, memory = self.cell(inputs, (hidden, memory))
        return self.output(torch.cat([hidden, memory], -1)).unflatten(0, x.shape[:2])


def swarm(size: Size) -> Iterator[Row]:
    """Measure forward and backward passes of one layer."""
    sets, entities = (1, 5) if size.tiny else (SETS, ENTITIES)
    x = torch.randn(sets, entities, DIM, device=size.device)
    layers = {
        "ours": SwarmLayer(DIM, UNITS, DIM, ITERATIONS, "mean"),
        "cells": CellLoop(),
    }

    def passes(layer: nn.Module) -> Callable[[], None]:
        layer = layer.to(size.device)
        return lambda: layer(x).square().sum().backward()

    contenders = {name: passes(layer) for name, layer in layers.items()}
    times = taking_turns(contenders, size.rounds)
    ours, cells = ([1e3 * spent for spent in durations] for durations in times.values())
    yield compare(
        "layer/swarm",
        ours,
        cells,
        "a loop of nn.LSTMCell",
        unit="ms",
        note=f"forward and backward, {sets} sets of {entities} entities, {UNITS} "
        f"units, {ITERATIONS} iterations, {torch.get_num_threads()} threads",
    )
