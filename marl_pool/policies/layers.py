"""Multilayer perceptrons."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from marl_pool.kernels.native.mlp import MLP


def linear_layers(
    widths: Sequence[int], activation: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Build a linear layer and an activation from each width to the next."""
    layers: list[nn.Module] = []
    for dims in pairwise(widths):
        layers += [nn.Linear(*dims), activation()]
    return layers


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module]) -> MLP:
    """Build linear layers with an activation between them."""
    return MLP(*linear_layers(widths, activation)[:-1])
