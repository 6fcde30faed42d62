"""Modules that the kernel may compute, and its calls as functions of autograd."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from marl_pool.compiled.choice import chosen_kernels
from marl_pool.compiled.native.call import library
from marl_pool.kernels.functional import input_gradients, is_transformed

PRECISE = (torch.float32, torch.float64)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OPTIONS = {"approximate": "none", "eps": 1e-5, "max_norm": None, "padding_idx": None}
"""Options of torch's layers for which the kernel supports only one value."""

Weight = tuple[nn.Module, str]
"""A parameter, as its module and its name there."""


def may_run(device: str = "cpu") -> bool:
    """Return True if neither a choice nor torch's mode rules out the kernel.

    ``device`` is a type, cpu or cuda.
    """
    # Compilers must not trace the rest.
    if is_transformed() or chosen_kernels() == "torch":
        return False
    if device not in ("cpu", "cuda") or (device == "cpu" and library() is None):
        return False
    # The kernel neither casts nor calls hooks.
    return not torch.is_autocast_enabled(device) and not _has_any_global_hook()


def is_plain(module: nn.Module) -> bool:
    """Return True if a module computes what its class does, without hooks."""
    state = vars(module)
    # Some libraries replace `forward` of single modules.
    return (
        not any(state[name] for name in _HOOKS)
        and "forward" not in state
        and all(state.get(name, value) == value for name, value in _OPTIONS.items())
    )


def have_shapes(weights: Sequence[Weight], shapes: Sequence[Sequence[int]]) -> bool:
    """Return True if all weights are plain parameters, dense and of these shapes.

    Pruning and parametrizations remove parameters.
    """
    parameters = [module._parameters.get(name) for module, name in weights]
    return [
        (type(parameter), parameter.layout, tuple(parameter.shape))
        for parameter in parameters
        if parameter is not None
    ] == [(nn.Parameter, torch.strided, tuple(shape)) for shape in shapes]


def tensors_of(weights: Sequence[Weight]) -> list[Tensor]:
    """Return the present parameters."""
    return [cast(Tensor, module._parameters[name]) for module, name in weights]


@contextmanager
def with_parameters(
    weights: Sequence[Weight], tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Use other tensors as parameters within the context."""
    before = tensors_of(weights)
    try:
        _set(weights, tensors)
        yield
    finally:
        _set(weights, before)


def _set(weights: Sequence[Weight], tensors: Sequence[Tensor]) -> None:
    for (module, name), tensor in zip(weights, tensors, strict=True):
        module._parameters[name] = cast(nn.Parameter, tensor)


class SharedModule(nn.Module):
    """A module that shares parameters, buffers, modules and mode with its original.

    Args:
        original: a module of the next class in the method resolution order.
    """

    original: nn.Module

    def __init__(self, original: nn.Module) -> None:
        # The same dictionaries; `original` is not registered as a module.
        vars(self).update(vars(original), original=original)

    @property
    def training(self) -> bool:
        """The mode of the original."""
        # A plain attribute would not follow `original.train()`.
        return self.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.original.training = mode


class NativeCall(Protocol):
    """One call: all that the gradient needs besides the input tensors."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Compute the result."""

    def gradients(
        self, inputs: Sequence[Tensor], gradient: Tensor, for_first: bool
    ) -> Sequence[Tensor | None]:
        """Return the gradient of each input; the first one's only if ``for_first``."""

    def in_torch(self, *inputs: Tensor) -> Tensor:
        """Compute the same with torch's operations."""


def compute(call: NativeCall, *inputs: Tensor) -> Tensor:
    """Run a call that autograd can differentiate."""
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
        # With create_graph=True torch computes the result again, since the kernel's
        # gradients cannot be differentiated.
        if torch.is_grad_enabled():
            inputs = ctx.saved_tensors
            result = call.in_torch(*inputs)
            return None, *input_gradients(result, inputs, gradient, create_graph=True)
        for_first = ctx.needs_input_grad[1]
        return None, *call.gradients(ctx.saved_tensors, gradient, for_first)
