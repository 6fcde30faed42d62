"""Multilayer perceptrons."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


def linear_layers(
    widths: Sequence[int], activation: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Build a linear layer and an activation from each width to the next."""
    layers: list[nn.Module] = []
    for dims in pairwise(widths):
        layers += [nn.Linear(*dims), activation()]
    return layers


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Build linear layers with an activation between them."""
    return nn.Sequential(*linear_layers(widths, activation)[:-1])
