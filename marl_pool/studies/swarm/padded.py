"""Batches of sets of many sizes: less padding to compute, and other orders."""

import torch
from torch import Tensor

from marl_pool.training.supervised.task import Batch

POINTWISE = ("points", "labels", "padding")
"""What a batch holds of each point, ``(B, N, …)``; all else it holds of each set."""
PIECE = 10
"""Sets that are computed together on a CPU."""


def by_length(batch: Batch) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Split a batch into pieces of similar length, without the padding that all have.

    Nothing that a network computes of a set changes, but a CPU needs a quarter of the
    time for fifty sets of 100 to 1000 points: half of all places are padding, and a
    piece fits its cache. On other devices a batch is one piece.

    Args:
        batch: with ``padding (B, N)``, all of it at a set's end.

    Returns:
        The pieces, and the places ``(B,)`` that put their rows, one after the other,
        into the order of the batch.
    """
    lengths = (~batch["padding"]).sum(1)
    order = lengths.argsort(stable=True)
    size = PIECE if order.device.type == "cpu" else len(order)
    pieces = [
        _cut({name: part[rows] for name, part in batch.items()}, int(lengths[rows[-1]]))
        for rows in order.split(size)
    ]
    return pieces, order.argsort()


def in_new_order(batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """Shuffle the points of each set; padding stays at the end.

    Args:
        batch: with ``padding (B, N)``.
        generator: on the CPU.
    """
    padding = batch["padding"]
    keys = torch.rand(padding.shape, generator=generator).to(padding.device)
    order = keys.masked_fill(padding, 2.0).argsort(1)
    rows = torch.arange(len(order), device=order.device)[:, None]
    shuffled = {name: part[rows, order] for name, part in _pointwise(batch).items()}
    return {**batch, **shuffled}


def _cut(batch: Batch, length: int) -> dict[str, Tensor]:
    cut = {name: part[:, :length] for name, part in _pointwise(batch).items()}
    return {**batch, **cut}


def _pointwise(batch: Batch) -> dict[str, Tensor]:
    return {name: batch[name] for name in POINTWISE if name in batch}
