"""Multilayer perceptron, computed by the compiled kernel where it fits."""

import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import ACTIVATIONS
from marl_pool.kernels.native import call as kernel
from marl_pool.kernels.native.actor_critic import Head
from marl_pool.kernels.native.plan import NativePlan, are_precise, compute, may_run


class MLP(nn.Sequential):
    """Linear layers with an activation between them.

    It is an `nn.Sequential` of these modules. Where they are `nn.Linear` with a bias
    and one of `ACTIVATIONS`, on a CPU and in float32 or float64, the compiled kernel
    computes them in one call.

    Shapes: ``(*B, inputs)`` to ``(*B, outputs)``.
    """

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self._native = _MlpPlan(self) if _qualifies(self) else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self._native is not None and self._native.fits(x):
            parameters = cast(list[Tensor], self._native.parameters())
            return compute(self._native, x, *parameters)
        return super().forward(x)

    def native_head(self) -> Head | None:
        """Return what the kernel reads; None if it does not compute these layers."""
        if self._native is None or not may_run() or not self._native.is_unchanged():
            return None
        parameters = self._native.parameters()
        if any(parameter is None for parameter in parameters):
            return None
        return Head(self._native.activation, cast(list[Tensor], parameters))


def linear_layers(
    widths: Sequence[int], activation: Callable[[], nn.Module]
) -> list[nn.Module]:
    """Build a linear layer and an activation from each width to the next."""
    pairs = [(nn.Linear(*dims), activation()) for dims in pairwise(widths)]
    return [layer for pair in pairs for layer in pair]


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module]) -> MLP:
    """Build linear layers with an activation between them."""
    return MLP(*linear_layers(widths, activation)[:-1])


class _MlpPlan(NativePlan):
    def __init__(self, mlp: MLP) -> None:
        layers = list(mlp)
        super().__init__(
            [mlp, *layers],
            {nn.GELU: ("approximate",)},
            [(layer, name) for layer in layers[::2] for name in ("weight", "bias")],
        )
        self.mlp = mlp
        self.activation = kernel.ACTIVATIONS[type(layers[1])] if len(layers) > 1 else 0

    def fits(self, x: Tensor) -> bool:
        """Return True if the kernel computes this call as torch would."""
        return (
            may_run()
            and type(x) is Tensor
            and x.dim() > 0
            and self.is_unchanged()
            and are_precise([x, *(parameters := self.parameters())])
            and kernel.fits_mlp(x.shape[-1], cast(list[Tensor], parameters))
        )

    def run(self, *inputs: Tensor) -> Tensor:
        values, *parameters = inputs
        out = values.new_empty((*values.shape[:-1], parameters[-1].shape[0]))
        self._call(values, parameters, (out, None, None, None))
        return out

    def gradients(
        self, inputs: Sequence[Tensor], gradient: Tensor, for_first: bool
    ) -> list[Tensor | None]:
        values, *parameters = inputs
        flat = values.new_empty(sum(map(torch.numel, parameters)))
        input_gradient = (
            values.new_empty(values.shape) if for_first else None
        )  # contiguous
        gradient = gradient.contiguous()
        shape = (*values.shape[:-1], len(parameters[-1]))
        kernel.require_memory(gradient, "gradient", shape, values.dtype)
        self._call(values, parameters, (None, gradient, flat, input_gradient))
        return [
            input_gradient,
            *torch._utils._unflatten_dense_tensors(flat, parameters),
        ]

    def _call(
        self,
        values: Tensor,
        parameters: Sequence[Tensor],
        results: tuple[Tensor | None, ...],
    ) -> None:
        """Check the arguments, then pass their pointers.

        ``results`` are memory of the result, the gradient by it, and memory of those by
        the parameters and by the values; None for what is not computed.
        """
        *batch, inputs = values.shape
        # Keep the copies until the kernel has read them.
        values, rows = values.contiguous(), math.prod(batch)
        sizes, weights = kernel.mlp_arguments(self.activation, rows, inputs, parameters)
        kernel.require_memory(values, "values", values.shape, weights.dtype)
        status = kernel.entry("mlp", values.dtype)(
            ctypes.byref(sizes),
            kernel.pointer(values),
            weights.addresses,
            *map(kernel.pointer, results),
            kernel.num_threads(),
        )
        kernel.validate(status)

    def in_torch(self, *inputs: Tensor) -> Tensor:
        with self.with_parameters(inputs[1:]):
            return nn.Sequential.forward(self.mlp, inputs[0])


def _qualifies(mlp: nn.Sequential) -> bool:
    layers = list(mlp)
    linears, activations = layers[::2], layers[1::2]
    return (
        len(linears) == len(activations) + 1
        and all(type(m) is nn.Linear and m.bias is not None for m in linears)
        and all(a.out_features == b.in_features for a, b in pairwise(linears))
        and len({type(module) for module in activations}) <= 1
        and all(type(module) in ACTIVATIONS.values() for module in activations)
        and all(getattr(m, "approximate", "none") == "none" for m in activations)
    )
