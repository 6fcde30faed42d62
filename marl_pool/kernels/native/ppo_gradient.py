"""The gradient of PPO's loss by all weights of a policy, in one call of the kernel.

The network is computed once, where autograd's backward pass would compute it again.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from marl_pool.kernels.native.actor_critic import ActorCritic, ActorCriticCall
from marl_pool.kernels.native.call import library, num_threads, pointers
from marl_pool.kernels.native.ppo_loss import (
    Coefficients,
    RecordedSteps,
    loss_argument,
    unknown_action,
)

_UNKNOWN_ACTION = 3  # Status of kernel.hpp


class _Results(ctypes.Structure):
    """``Results`` of ppo_gradient.hpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("for_network", "for_action", "for_value", "losses", "loss")
    )


class PPOGradient(NamedTuple):
    """The loss, and the outputs that it was computed from."""

    loss: Tensor
    """Scalar, the mean over the rows."""
    logits: Tensor
    """``(B, L)``."""
    values: Tensor
    """``(B,)`` in the units of the targets."""


def fits(policy: ActorCritic, recorded: RecordedSteps) -> bool:
    """Return True if `ppo_gradient` can compute these rows.

    Args:
        policy: policy of which `ActorCritic.is_precise` is True.
        recorded: what was recorded of each row.
    """
    return recorded.fits(policy.network.values)


def ppo_gradient(
    policy: ActorCritic,
    coefficients: Coefficients,
    recorded: RecordedSteps,
    value_scale: Tensor | None,
) -> PPOGradient:
    """Write the gradient of the mean loss to ``grad`` of every parameter of a policy.

    Each parameter must have a contiguous ``grad``, which is overwritten.

    Args:
        policy: policy that `fits` accepts.
        coefficients: coefficients of the loss.
        recorded: steps that `fits` accepts.
        value_scale: ``(B,)``, factors of the values in the loss; None for 1.

    Raises:
        IndexError: an action is not among the choices, or a type is out of range.
        MemoryError: there is no memory for the call.
    """
    assert fits(policy, recorded)
    # Memory of the results: logits and values with their gradients, and the losses of
    # the rows with their mean.
    rows, width = policy.network.values.shape[0], policy.num_logits
    memory = policy.network.values.new_empty(rows * (2 * width + 3) + 1)
    logits, for_logits, values, for_values, losses, loss = memory.split(
        [rows * width, rows * width, rows, rows, rows, 1]
    )
    logits = logits.view(rows, width)
    # Keep copies and arrays of pointers until the kernel has read them.
    recorded = recorded.contiguous()
    columns = loss_argument(
        coefficients, recorded, logits, values, for_logits, for_values
    )
    parts = (policy.network, policy.action, policy.value)
    arrays = [pointers(_gradients(part.parameters)) for part in parts]
    results = _Results(
        *map(ctypes.addressof, arrays), losses.data_ptr(), loss.data_ptr()
    )
    call, kernel = ActorCriticCall(policy, logits, values, value_scale), library()
    assert kernel is not None
    double = call.network.double
    entry = (
        kernel.marl_pool_ppo_gradient_double
        if double
        else kernel.marl_pool_ppo_gradient_float
    )
    status = entry(
        *call.arguments, ctypes.byref(columns), ctypes.byref(results), num_threads()
    )
    call.network.validate(status)
    if status == _UNKNOWN_ACTION:
        raise unknown_action(width)
    return PPOGradient(loss.view(()), logits, values)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None  # grad has the parameter's shape and dtype
        assert gradient.is_contiguous()
        found.append(gradient)
    return found
