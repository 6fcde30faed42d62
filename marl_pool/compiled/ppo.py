"""The loss of proximal policy optimization and its gradient, by the compiled kernel."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from marl_pool.compiled.actor_critic import ActorCritic, ActorCriticCall, Head
from marl_pool.compiled.module import PRECISE, may_run
from marl_pool.compiled.native.call import (
    entry,
    fields,
    pointer,
    pointers,
    require,
    require_memory,
)

_UNKNOWN_ACTION = 3  # Status of kernel.hpp
_COLUMNS = ("actions", "log_probs", "logits", "advantages", "targets")


class _Loss(ctypes.Structure):
    """``Loss`` of ppo_loss.hpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *fields(ctypes.c_int32, "width choices"),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        *fields(ctypes.c_double, "clip value_coeff value_clip entropy_coeff kl_coeff"),
        *fields(ctypes.c_void_p, "logits values actions log_probs old_logits"),
        *fields(ctypes.c_void_p, "advantages targets logits_gradient values_gradient"),
    )


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of the loss; `marl_pool.training.ppo.loss.PPOTerms` has the formula.

    Args:
        clip: ε, the limit of the ratio's distance from 1.
        value: c_v.
        value_clip: d, the limit of a squared error of the values; inf for none.
        entropy: c_e.
        kl: c_kl.
    """

    clip: float
    value: float
    value_clip: float
    entropy: float
    kl: float


@dataclass(frozen=True)
class RecordedSteps:
    """Columns of the training batch.

    Args:
        actions: as in an `ActionSpec`: ``(B, K + A)``, int64 without a Box, or
            ``(B,)`` int64 for one choice.
        log_probs: ``(B,)``.
        logits: ``(B, L)`` of the policy that sampled.
        advantages: ``(B,)``.
        targets: ``(B,)``.
        sizes: number of options of each of the K choices.
    """

    actions: Tensor
    log_probs: Tensor
    logits: Tensor
    advantages: Tensor
    targets: Tensor
    sizes: tuple[int, ...] = ()

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The tensors."""
        return tuple(getattr(self, name) for name in _COLUMNS)

    def fits(self, *outputs: Tensor) -> bool:
        """Return True if the kernel can compute the loss of logits and values.

        ``outputs`` are these, or tensors of the dtype that they will have.
        """
        numbers = [*outputs, self.log_probs, self.logits, self.advantages, self.targets]
        if self.actions.dtype != torch.int64:
            numbers.append(self.actions)
        return (
            may_run()
            and numbers[0].dtype in PRECISE
            and all(tensor.dtype == numbers[0].dtype for tensor in numbers)
            and all(tensor.is_cpu for tensor in (*numbers, self.actions))
            and all(output.shape[0] > 0 for output in outputs)
        )

    def contiguous(self) -> "RecordedSteps":
        """Return the columns in contiguous memory."""
        columns: Any = {name: getattr(self, name).contiguous() for name in _COLUMNS}
        return replace(self, **columns)


def ppo_loss(
    coefficients: Coefficients, recorded: RecordedSteps, logits: Tensor, values: Tensor
) -> Tensor:
    """Return the mean loss, a scalar, differentiable in ``logits`` and ``values``.

    Args:
        coefficients: coefficients of the terms.
        recorded: steps that `RecordedSteps.fits` accepts with these outputs.
        logits: ``(B, L)`` of the current policy.
        values: ``(B,)`` in the units of the targets.

    Raises:
        IndexError: an action is not among the choices.
    """
    return _LossFunction.apply(coefficients, recorded, logits, values)


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        coefficients: Coefficients,
        recorded: RecordedSteps,
        logits: Tensor,
        values: Tensor,
    ) -> Tensor:
        # The gradients cost little more than the loss, so both are computed here.
        require(recorded.fits(logits, values), "columns of the outputs' dtype")
        # Keep the copies until the kernel has read them.
        logits, values = logits.contiguous(), values.contiguous()
        recorded = recorded.contiguous()
        rows, width = logits.shape
        # One allocation for all results.
        memory = logits.new_empty(rows * (width + 1) + 1)
        logits_gradient, values_gradient, loss = memory.split([rows * width, rows, 1])
        columns = _loss_argument(
            coefficients, recorded, logits, values, logits_gradient, values_gradient
        )
        compute = entry("ppo_loss", logits.dtype)
        compute.restype = ctypes.c_bool
        if not compute(ctypes.byref(columns), pointer(loss)):
            raise _unknown_action(recorded.sizes)
        ctx.save_for_backward(logits_gradient.view_as(logits), values_gradient)
        return loss.view(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits_gradient, values_gradient = ctx.saved_tensors
        return None, None, gradient * logits_gradient, gradient * values_gradient


def _loss_argument(
    coefficients: Coefficients,
    recorded: RecordedSteps,
    logits: Tensor,
    values: Tensor,
    logits_gradient: Tensor,
    values_gradient: Tensor,
) -> _Loss:
    """Check the columns, which have to be contiguous, and return their pointers.

    The memory for the gradients of logits and values has B · L and B numbers.
    """
    rows, width = logits.shape
    sizes, dtype = recorded.sizes, logits.dtype
    # The Box has a mean and a log-std for each number.
    numbers, odd = divmod(width - sum(sizes), 2)
    require(numbers >= 0 and not odd, "logits of the choices, and two for each number")
    entries, discrete = len(sizes) + numbers, numbers == 0
    is_one = discrete and entries == 1 and recorded.actions.dim() == 1
    actions = (rows,) if is_one else (rows, entries)
    columns = {
        "logits": (logits, (rows, width)),
        "values": (values, (rows,)),
        "actions": (recorded.actions, actions),
        "log-probabilities": (recorded.log_probs, (rows,)),
        "recorded logits": (recorded.logits, (rows, width)),
        "advantages": (recorded.advantages, (rows,)),
        "targets": (recorded.targets, (rows,)),
        "memory of the logits' gradient": (logits_gradient, (rows * width,)),
        "memory of the values' gradient": (values_gradient, (rows,)),
    }
    for name, (column, shape) in columns.items():
        expected = torch.int64 if discrete and name == "actions" else dtype
        require_memory(column, name, shape, expected)
    return _Loss(
        rows,
        width,
        len(sizes),
        (ctypes.c_int32 * len(sizes))(*sizes),
        *vars(coefficients).values(),
        *(column.data_ptr() for column, _ in columns.values()),
    )


def _unknown_action(sizes: tuple[int, ...]) -> IndexError:
    ranges = ", ".join(f"0 to {size - 1}" for size in sizes)
    return IndexError(f"actions: expected {ranges}")


class _Results(ctypes.Structure):
    """``Results`` of ppo_gradient.hpp."""

    _fields_ = (
        *fields(ctypes.c_void_p, "network_gradients action_gradients value_gradients"),
        *fields(ctypes.c_void_p, "losses loss"),
    )


def without_value(policy: ActorCritic) -> ActorCritic:
    """Return the policy with a value of 0, from weights whose gradient is not read."""
    weight = policy.network.values.new_zeros(1, policy.network.sizes.dim)
    bias = weight.new_zeros(1)
    # The kernel writes a gradient for each weight.
    weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
    return replace(policy, value=Head(0, (weight, bias)))


class PPOGradient(NamedTuple):
    """The loss, and the outputs that it was computed from."""

    loss: Tensor
    """Scalar, the mean over the rows."""
    logits: Tensor
    """``(B, L)``."""
    values: Tensor
    """``(B,)`` in the units of the targets."""


def ppo_gradient(
    policy: ActorCritic,
    coefficients: Coefficients,
    recorded: RecordedSteps,
    value_scale: Tensor | None,
) -> PPOGradient:
    """Write the gradient of the mean loss to ``grad`` of every parameter of a policy.

    The network is computed once, where autograd's backward pass would compute it again.
    Each parameter must have a contiguous ``grad``, which is overwritten.

    Args:
        policy: policy and observations.
        coefficients: coefficients of the loss.
        recorded: steps that `RecordedSteps.fits` accepts with the policy's tokens.
        value_scale: ``(B,)``, factors of the values in the loss; None for 1.

    Raises:
        IndexError: an action is not among the choices.
        InputError: a type is out of range.
        MemoryError: there is no memory for the call.
    """
    require(recorded.fits(policy.network.values), "columns of the values' dtype")
    # Memory for the results: logits and values with their gradients, and the rows'
    # losses with their mean.
    rows, width = policy.network.values.shape[0], policy.num_logits
    memory = policy.network.values.new_empty(rows * (2 * width + 3) + 1)
    logits, logits_gradient, values, values_gradient, losses, loss = memory.split(
        [rows * width, rows * width, rows, rows, rows, 1]
    )
    logits = logits.view(rows, width)
    # Keep copies and arrays of pointers until the kernel has read them.
    recorded = recorded.contiguous()
    columns = _loss_argument(
        coefficients, recorded, logits, values, logits_gradient, values_gradient
    )
    parts = (policy.network, policy.action, policy.value)
    arrays = [pointers(_gradients(part.parameters)) for part in parts]
    results = _Results(
        *map(ctypes.addressof, arrays), losses.data_ptr(), loss.data_ptr()
    )
    call = ActorCriticCall(policy, logits, values, value_scale)
    status = call("ppo_gradient", ctypes.byref(columns), ctypes.byref(results))
    if status == _UNKNOWN_ACTION:
        raise _unknown_action(recorded.sizes)
    return PPOGradient(loss.view(()), logits, values)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    # One whose `data` was replaced may have a gradient of another shape.
    for gradient, parameter in zip(gradients, parameters, strict=True):
        require(gradient is not None, "a gradient for each weight, got none")
        require_memory(gradient, "gradient", parameter.shape, parameter.dtype)
    return gradients
