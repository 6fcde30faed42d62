"""Activation functions by name."""

from typing import Literal

from torch import nn

from marl_pool.utils.names import unknown

Activation = Literal["gelu", "relu"]
ACTIVATIONS: dict[Activation, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}
"""GELU is the exact x Φ(x), not its approximation by tanh."""


def make_activation(name: Activation, option: str) -> nn.Module:
    """Build an activation function.

    Args:
        name: a key of `ACTIVATIONS`.
        option: key of the option with this value, for the message.

    Raises:
        InputError: an unknown name.
    """
    if name not in ACTIVATIONS:
        raise unknown(option, name, ACTIVATIONS)
    return ACTIVATIONS[name]()
