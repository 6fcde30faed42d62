"""Multilayer perceptrons of policies' heads, computed by the compiled kernel."""

import ctypes
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.compiled.actor_critic import Head
from marl_pool.compiled.module import (
    PRECISE,
    SharedModule,
    compute,
    have_shapes,
    is_plain,
    may_run,
    tensors_of,
    with_parameters,
)
from marl_pool.compiled.native import call as kernel


class CompiledMLP(SharedModule, nn.Sequential):
    """Linear layers with an activation between them, computed in one call.

    Made by `compile_mlp`. Shapes: ``(*B, inputs)`` to ``(*B, outputs)``.
    """

    def __init__(self, original: nn.Sequential) -> None:
        super().__init__(original)
        layers = list(original)
        linears = [layer for layer in layers[::2] if isinstance(layer, nn.Linear)]
        self.widths = (linears[0].in_features, *[x.out_features for x in linears])
        self.weights = [(x, name) for x in linears for name in ("weight", "bias")]
        self.activation = kernel.ACTIVATIONS[type(layers[1])] if len(layers) > 1 else 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        parameters = tensors_of(self.weights)
        dtype = parameters[0].dtype
        fits = (
            may_run()
            and type(x) is Tensor
            and x.is_cpu
            and x.dim() > 0
            and x.shape[-1] == self.widths[0]
            and x.dtype == dtype
            and dtype in PRECISE
        )
        return compute(_MlpCall(self), x, *parameters) if fits else super().forward(x)

    def head(self, weights: kernel.Weights | None = None) -> Head:
        """Return what the kernel of a whole policy reads.

        ``weights`` were gathered earlier; None for the current ones.
        """
        return Head(self.activation, weights or tensors_of(self.weights))


def compile_mlp(layers: nn.Module) -> nn.Module:
    """Return the compiled counterpart of layers if the kernel computes them.

    These are `nn.Linear` with a bias, and one of `kernel.ACTIVATIONS` between them.
    """
    if type(layers) is not nn.Sequential or not all(map(is_plain, layers.modules())):
        return layers
    linears, activations = list(layers)[::2], list(layers)[1::2]
    kinds = {type(module) for module in activations}
    if (
        len(linears) == len(activations) + 1
        and all(type(module) is nn.Linear for module in linears)
        and len(kinds) <= 1
        and kinds <= {nn.GELU, nn.ReLU}
    ):
        compiled = CompiledMLP(layers)
        pairs = pairwise(compiled.widths)
        shapes = [shape for i, o in pairs for shape in ((o, i), (o,))]
        if have_shapes(compiled.weights, shapes):
            return compiled
    return layers


class _MlpCall:
    def __init__(self, mlp: CompiledMLP) -> None:
        self.mlp = mlp

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
        # Contiguous, unlike what `empty_like` returns.
        input_gradient = values.new_empty(values.shape) if for_first else None
        gradient = gradient.contiguous()
        shape = (*values.shape[:-1], len(parameters[-1]))
        kernel.require_memory(gradient, "gradient", shape, values.dtype)
        self._call(values, parameters, (None, gradient, flat, input_gradient))
        parts = torch._utils._unflatten_dense_tensors(flat, parameters)
        return [input_gradient, *parts]

    def _call(
        self,
        values: Tensor,
        parameters: Sequence[Tensor],
        results: tuple[Tensor | None, ...],
    ) -> None:
        """Check the arguments, then pass their pointers.

        ``results`` are memory for the result, its gradient, and memory for the
        gradients of parameters and of values; None for what is not computed.
        """
        *batch, inputs = values.shape
        # Keep the copies until the kernel has read them.
        values, rows = values.contiguous(), math.prod(batch)
        activation = self.mlp.activation
        sizes, weights = kernel.mlp_arguments(activation, rows, inputs, parameters)
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
        with with_parameters(self.mlp.weights, inputs[1:]):
            return nn.Sequential.forward(self.mlp, inputs[0])
