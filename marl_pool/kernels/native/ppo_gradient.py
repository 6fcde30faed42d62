"""The gradient of PPO's loss by all weights of a policy, in one call of the kernel.

The network is computed once, where autograd's backward pass would compute it again.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marl_pool.kernels.native.call import (
    KernelCall,
    MlpSizes,
    NetworkInputs,
    library,
    mlp_sizes,
    num_threads,
    pointer,
    pointers,
)
from marl_pool.kernels.native.plan import are_precise
from marl_pool.kernels.native.ppo_loss import (
    Coefficients,
    RecordedSteps,
    loss_argument,
    unknown_action,
)

_POINTER = ctypes.c_void_p
_UNKNOWN_ACTION = 3  # Status of kernel.hpp


class _Heads(ctypes.Structure):
    """``Heads`` of ppo_gradient.hpp."""

    _fields_ = (
        ("action", MlpSizes),
        ("value", MlpSizes),
        *(
            (name, _POINTER)
            for name in (
                "action_weights",
                "value_weights",
                "lowest",
                "highest",
                "value_scale",
                "losses",
                "for_action",
                "for_value",
            )
        ),
    )


class Head(NamedTuple):
    """A multilayer perceptron on the pooled vector."""

    activation: int
    """Code of the activation between the layers."""
    parameters: Sequence[Tensor]
    """Weight and bias of each layer."""


@dataclass(frozen=True)
class ActorCritic:
    """A policy and its observations, as the kernel reads them.

    Args:
        network: the set network with its pooling head.
        action: head of the logits.
        value: head of the value.
        limits: lowest and highest logits, ``(L,)`` each; None for none.
    """

    network: NetworkInputs
    action: Head
    value: Head
    limits: tuple[Tensor, Tensor] | None

    @property
    def parameters(self) -> list[Tensor]:
        """All weights."""
        heads = (self.action, self.value)
        return [*self.network.parameters, *(p for h in heads for p in h.parameters)]


class PPOGradient(NamedTuple):
    """The loss, and the outputs that it was computed from."""

    loss: Tensor
    """Scalar, the mean over the rows."""
    logits: Tensor
    """``(B, L)``."""
    values: Tensor
    """``(B,)`` in the units of the targets."""


def fits(policy: ActorCritic, recorded: RecordedSteps) -> bool:
    """Return True if `ppo_gradient` can compute these rows."""
    numbers = [policy.network.values, *policy.parameters, *(policy.limits or ())]
    return are_precise(numbers) and recorded.fits(policy.network.values)


def ppo_gradient(
    policy: ActorCritic,
    coefficients: Coefficients,
    recorded: RecordedSteps,
    value_scale: Tensor | None,
    gradients: Mapping[Tensor, Tensor],
) -> PPOGradient:
    """Write the gradient of the mean loss by every parameter of a policy.

    Args:
        policy: policy that `fits` accepts.
        coefficients: coefficients of the loss.
        recorded: steps that `fits` accepts.
        value_scale: ``(B,)``, factors of the values in the loss; None for 1.
        gradients: for every parameter, contiguous memory of its gradient.

    Raises:
        IndexError: an action is not among the choices, or a type is out of range.
        MemoryError: there is no memory for the call.
    """
    network = policy.network
    rows, width = len(network.values), len(policy.action.parameters[-1])
    # Memory of the results: logits and values with their gradients, and the losses of
    # the rows with their mean.
    memory = network.values.new_empty(rows * (2 * width + 3) + 1)
    logits, for_logits, values, for_values, losses, loss = memory.split(
        [rows * width, rows * width, rows, rows, rows, 1]
    )
    logits = logits.view(rows, width)
    # Check the arguments, which keep copies until the kernel has read them.
    assert fits(policy, recorded)
    recorded = recorded.contiguous()
    columns = loss_argument(
        coefficients, recorded, logits, values, for_logits, for_values
    )
    heads = _HeadsCall(policy, value_scale, losses, gradients)
    call = KernelCall(*network)
    found = pointers([_memory_of(p, gradients) for p in network.parameters])
    kernel = library()
    assert kernel is not None
    status = (
        kernel.marl_pool_ppo_gradient_double
        if call.double
        else kernel.marl_pool_ppo_gradient_float
    )(
        *call.arguments,
        ctypes.byref(heads.argument),
        ctypes.byref(columns),
        found,
        pointer(loss),
        num_threads(),
    )
    call.validate(status)
    if status == _UNKNOWN_ACTION:
        raise unknown_action(width)
    return PPOGradient(loss.view(()), logits, values)


class _HeadsCall:
    """The heads' argument, and the tensors and arrays that it points to."""

    def __init__(
        self,
        policy: ActorCritic,
        value_scale: Tensor | None,
        losses: Tensor,
        gradients: Mapping[Tensor, Tensor],
    ) -> None:
        rows, dim = len(losses), policy.network.sizes.dim
        heads = (policy.action, policy.value)
        sizes = [mlp_sizes(h.activation, rows, dim, h.parameters) for h in heads]
        assert len(policy.value.parameters[-1]) == 1
        lowest, highest = policy.limits or (None, None)
        for limit in policy.limits or ():
            assert limit.shape == policy.action.parameters[-1].shape
            assert limit.is_contiguous()
        if value_scale is not None:
            assert value_scale.shape == (rows,)
            assert value_scale.dtype == losses.dtype
            value_scale = value_scale.contiguous()
        self.numbers = (lowest, highest, value_scale, losses)
        self.weights = [[p.contiguous() for p in h.parameters] for h in heads]
        found = [[_memory_of(p, gradients) for p in h.parameters] for h in heads]
        self.arrays = [pointers(tensors) for tensors in (*self.weights, *found)]
        of_weights, of_gradients = self.arrays[:2], self.arrays[2:]
        self.argument = _Heads(
            *sizes,
            *map(ctypes.addressof, of_weights),
            *map(pointer, self.numbers),
            *map(ctypes.addressof, of_gradients),
        )


def _memory_of(parameter: Tensor, gradients: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the memory of a parameter's gradient."""
    memory = gradients[parameter]
    assert memory.shape == parameter.shape
    assert memory.dtype == parameter.dtype
    assert memory.is_contiguous()
    return memory
