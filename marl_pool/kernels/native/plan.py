"""Modules that the compiled kernel computes: their state, and autograd's gradient."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from marl_pool.kernels.functional import input_gradients, is_transformed
from marl_pool.kernels.native import chosen_kernels
from marl_pool.kernels.native.call import CPU, library

_CHILDREN_AND_HOOKS = operator.itemgetter(
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_PLAIN = {Tensor, nn.Parameter}
_PRECISE = ({torch.float32}, {torch.float64})
_DTYPE, _LAYOUT, _DEVICE, _IS_CPU = map(
    operator.attrgetter, ("dtype", "layout", "device", "is_cpu")
)


def may_run(device: str = "cpu") -> bool:
    """Return True if neither a choice nor torch's mode rules out the kernel.

    ``device`` is a type, cpu or cuda.
    """
    # A compiler must not meet the rest.
    if is_transformed() or chosen_kernels() == "torch":
        return False
    if device not in ("cpu", "cuda") or (device == "cpu" and library() is None):
        return False
    return not torch.is_autocast_enabled(device) and not _has_any_global_hook()


def has_hooks(module: nn.Module) -> bool:
    """Return True if a hook of the module runs before or after a pass through it."""
    _, *hooks = _CHILDREN_AND_HOOKS(vars(module))
    return any(hooks)


class NativePlan:
    """Modules as they were when the plan was made; every call compares them.

    Args:
        modules: all modules that the kernel computes.
        options: by class, attributes on which a module's result depends, besides
            parameters and modules.
        weights: parameters in the kernel's order, as modules and names.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        options: Mapping[type[nn.Module], tuple[str, ...]],
        weights: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self.modules, self.weights = modules, weights
        self.kinds = [type(module) for module in modules]
        # Every call compares all of them, so this is the fastest form.
        self.states: list[tuple[dict[str, Any], ...]] = [
            (dict(module._modules), {}, {}, {}, {}) for module in modules
        ]
        self.optional = [
            (module, name)
            for module in modules
            for name in options.get(type(module), ())
        ]
        self.options = self._options()

    def is_unchanged(self) -> bool:
        """Return True if modules and options are the plan's, without hooks."""
        states = list(map(vars, self.modules))
        return (
            list(map(type, self.modules)) == self.kinds
            and list(map(_CHILDREN_AND_HOOKS, states)) == self.states
            and not [state for state in states if "forward" in state]
            and self._options() == self.options
        )

    def parameters(self) -> list[Tensor | None]:
        """Return the present parameters.

        None stands for one that was removed, as pruning and parametrizations do.
        """
        return [module._parameters.get(name) for module, name in self.weights]

    @contextmanager
    def with_parameters(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Use other tensors as parameters within the context."""
        before = self.parameters()
        try:
            self._set_parameters(parameters)
            yield
        finally:
            self._set_parameters(before)

    def _set_parameters(self, parameters: Sequence[Tensor | None]) -> None:
        for (module, name), parameter in zip(self.weights, parameters, strict=True):
            module._parameters[name] = cast(nn.Parameter, parameter)

    def _options(self) -> list[Any]:
        return [getattr(module, name) for module, name in self.optional]


def are_precise(
    tensors: Sequence[Tensor | None], device: torch.device | None = None
) -> bool:
    """Return True if all are on a device and of one dtype, float32 or float64.

    They must be dense, and no subclass, of which the memory may be elsewhere. None
    stands for a tensor that is missing, and for the CPU.
    """
    # Every call compares all of them, so this is the fastest form.
    return (
        set(map(type, tensors)) <= _PLAIN
        and set(map(_DTYPE, tensors)) in _PRECISE
        and set(map(_LAYOUT, tensors)) == {torch.strided}
        and (
            all(map(_IS_CPU, tensors))
            if device is None or device == CPU
            else set(map(_DEVICE, tensors)) == {device}
        )
    )


class NativeCall(Protocol):
    """One call: all that the gradient needs besides the input tensors."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the result."""

    def gradients(
        self, inputs: Sequence[Tensor], gradient: Tensor, for_first: bool
    ) -> Sequence[Tensor | None]:
        """Return the gradient by each input, by the first one if it is asked for."""

    def in_torch(self, *inputs: Tensor) -> Tensor:
        """Compute the same by torch's operations."""


def compute(call: NativeCall, *inputs: Tensor) -> Tensor:
    """Run a call, so that autograd knows its gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Function.apply(call, *inputs)
    return call.run(*inputs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: NativeCall, *inputs: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call.run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: NativeCall = ctx.call
        if torch.is_grad_enabled():  # create_graph=True
            inputs = ctx.saved_tensors
            result = call.in_torch(*inputs)
            return None, *input_gradients(result, inputs, gradient, create_graph=True)
        for_first = ctx.needs_input_grad[1]
        return None, *call.gradients(ctx.saved_tensors, gradient, for_first)
