"""Layers for one set of weights, or batched over those of a population.

Weights may have a leading dimension P; then their input and result have it, too.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight + bias``, batched over P.

    Args:
        x: ``(*P, *S, I)``, with at least one dimension S.
        weight: ``(*P, I, O)``, with one dimension P or none.
        bias: ``(*P, O)``; None for none.

    Returns:
        ``(*P, *S, O)``.
    """
    lead = weight.dim() - 2
    # One product for all rows of a member: many small ones are several times slower.
    rows = x.flatten(lead, -2)
    if bias is None:
        result = rows @ weight
    elif lead:
        result = torch.baddbmm(bias[:, None], rows, weight)
    else:
        result = torch.addmm(bias, rows, weight)
    return result.unflatten(lead, x.shape[lead:-1])


def tanh(x: Tensor) -> Tensor:
    """Compute ``2 σ(2 x) - 1``, twice as fast on a CPU as `torch.tanh`."""
    return torch.add(x.new_full((), -1.0), (2 * x).sigmoid(), alpha=2)


Layer = tuple[Tensor, Tensor]
"""Weight ``(*P, I, O)`` and bias ``(*P, O)``."""


def strip_prefix(
    prefix: str, parameters: Mapping[str, Tensor], separator: str = "."
) -> dict[str, Tensor]:
    """Select the parameters whose name starts with ``prefix``, without that prefix."""
    start = prefix + separator
    return {
        name.removeprefix(start): parameter
        for name, parameter in parameters.items()
        if name.startswith(start)
    }


def layers_of(parameters: Mapping[str, Tensor]) -> list[Layer]:
    """Return the linear layers of a Sequential, for `tanh_layers`.

    Args:
        parameters: parameters of the Sequential, weight and bias of each layer in turn.
    """
    pairs = iter(parameters.values())
    return [(weight.mT, bias) for weight, bias in zip(pairs, pairs, strict=True)]


def tanh_layers(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Apply linear layers with tanh between them, and none after the last."""
    *hidden, last = layers
    for weight, bias in hidden:
        x = tanh(batched_linear(x, weight, bias))
    return batched_linear(x, *last)
