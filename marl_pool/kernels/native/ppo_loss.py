"""The loss of proximal policy optimization, computed by the compiled kernel."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from marl_pool.kernels.native.call import library
from marl_pool.kernels.native.plan import are_precise, may_run


class LossArgument(ctypes.Structure):
    """``Loss`` of ppo_loss.hpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("discrete", ctypes.c_int32),
        *(
            (name, ctypes.c_double)
            for name in (
                "clip",
                "value_coeff",
                "value_clip",
                "entropy_coeff",
                "kl_coeff",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "logits",
                "values",
                "actions",
                "log_probs",
                "old_logits",
                "advantages",
                "targets",
                "for_logits",
                "for_values",
            )
        ),
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
        actions: ``(B, L / 2)``, or ``(B,)`` int64 for choices.
        log_probs: ``(B,)``.
        logits: ``(B, L)`` of the policy that sampled.
        advantages: ``(B,)``.
        targets: ``(B,)``.
    """

    actions: Tensor
    log_probs: Tensor
    logits: Tensor
    advantages: Tensor
    targets: Tensor

    def fits(self, *outputs: Tensor) -> bool:
        """Return True if the kernel can compute the loss.

        Args:
            *outputs: logits and values, or tensors of the dtype that they will have.
        """
        numbers = [*outputs, self.log_probs, self.logits, self.advantages, self.targets]
        if self.actions.dtype != torch.int64:
            numbers.append(self.actions)
        return (
            may_run()
            and are_precise(numbers)
            and self.actions.is_cpu
            and all(output.shape[0] > 0 for output in outputs)
        )

    def contiguous(self) -> "RecordedSteps":
        """Return the columns in contiguous memory."""
        return RecordedSteps(*[column.contiguous() for column in vars(self).values()])


def ppo_loss(
    coefficients: Coefficients, recorded: RecordedSteps, logits: Tensor, values: Tensor
) -> Tensor:
    """Return the mean loss, a scalar, with a gradient by ``logits`` and ``values``.

    Args:
        coefficients: coefficients of the terms.
        recorded: steps that `RecordedSteps.fits` accepts with these outputs.
        logits: ``(B, L)`` of the current policy.
        values: ``(B,)`` in the units of the targets.

    Raises:
        IndexError: an action is not among the choices.
    """
    result: Tensor = _LossFunction.apply(coefficients, recorded, logits, values)
    return result


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
        loss, *gradients = _call(coefficients, recorded, logits, values)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for_logits, for_values = ctx.saved_tensors
        return None, None, gradient * for_logits, gradient * for_values


def _call(
    coefficients: Coefficients, recorded: RecordedSteps, logits: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert recorded.fits(logits, values)
    # Keep the copies until the kernel has read them.
    logits, values = logits.contiguous(), values.contiguous()
    recorded = recorded.contiguous()
    rows, width = logits.shape
    for_logits, for_values, loss = logits.new_empty(rows * (width + 1) + 1).split(
        [rows * width, rows, 1]
    )
    argument = loss_argument(
        coefficients, recorded, logits, values, for_logits, for_values
    )
    kernel, double = library(), logits.dtype == torch.float64
    assert kernel is not None
    entry = (
        kernel.marl_pool_ppo_loss_double if double else kernel.marl_pool_ppo_loss_float
    )
    entry.restype = ctypes.c_bool
    if not entry(ctypes.byref(argument), ctypes.c_void_p(loss.data_ptr())):
        raise unknown_action(width)
    return loss.view(()), for_logits.view_as(logits), for_values


def loss_argument(
    coefficients: Coefficients,
    recorded: RecordedSteps,
    logits: Tensor,
    values: Tensor,
    for_logits: Tensor,
    for_values: Tensor,
) -> LossArgument:
    """Check the columns, which have to be contiguous, and return their pointers.

    Args:
        coefficients: coefficients of the terms.
        recorded: recorded columns.
        logits: ``(B, L)``.
        values: ``(B,)``.
        for_logits: memory of the gradient by the logits, B · L numbers.
        for_values: memory of the gradient by the values, B numbers.
    """
    rows, width = logits.shape
    discrete = recorded.actions.dtype == torch.int64
    assert recorded.logits.shape == logits.shape
    assert recorded.actions.shape == ((rows,) if discrete else (rows, width / 2))
    for column in (values, recorded.log_probs, recorded.advantages, recorded.targets):
        assert column.shape == (rows,)
    columns = (logits, values, *vars(recorded).values(), for_logits, for_values)
    for column in columns:
        assert column.is_contiguous()
    return LossArgument(
        rows,
        width,
        discrete,
        coefficients.clip,
        coefficients.value,
        coefficients.value_clip,
        coefficients.entropy,
        coefficients.kl,
        *map(Tensor.data_ptr, columns),
    )


def unknown_action(width: int) -> IndexError:
    """Return the error for an action that is not among the choices."""
    return IndexError(f"actions: expected 0 to {width - 1}")
