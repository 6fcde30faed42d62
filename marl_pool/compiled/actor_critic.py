"""A policy's network and both heads, computed by one call of the kernel."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from marl_pool.compiled.native.call import (
    KernelCall,
    MlpSizes,
    NetworkInputs,
    Weights,
    fields,
    mlp_arguments,
    parameter_shapes,
    pointer,
    require,
    require_memory,
)


class _Heads(ctypes.Structure):
    """``Heads`` of heads.hpp."""

    _fields_ = (
        ("action", MlpSizes),
        ("value", MlpSizes),
        *fields(ctypes.c_void_p, "action_weights value_weights lowest highest"),
        *fields(ctypes.c_void_p, "value_scale logits values"),
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
    def num_logits(self) -> int:
        """L."""
        return self.action.parameters[-1].shape[0]

    def gather_weights(self) -> tuple[Weights, Weights, Weights]:
        """Return the weights of network, action and value head, to be read many times.

        They share the parameters' memory, and keep it if a parameter's is replaced.
        """
        dim, detach = self.network.sizes.dim, Tensor.detach
        shapes = parameter_shapes(self.network.sizes)
        network = Weights.of([*map(detach, self.network.parameters)], shapes)
        action, value = (
            mlp_arguments(0, 0, dim, [*map(detach, head.parameters)])[1]
            for head in (self.action, self.value)
        )
        return network, action, value


class ActorCriticCall(KernelCall):
    """The arguments of one call, for the network and its heads.

    Args:
        policy: policy and observations.
        logits: memory of the logits, ``(B, L)``.
        values: memory of the values, ``(B,)``.
        value_scale: ``(B,)``, factors of the values; None for 1.
    """

    def __init__(
        self,
        policy: ActorCritic,
        logits: Tensor,
        values: Tensor,
        value_scale: Tensor | None = None,
    ) -> None:
        super().__init__(policy.network)
        rows, dim = policy.network.values.shape[0], policy.network.sizes.dim
        heads = (policy.action, policy.value)
        parts = [mlp_arguments(h.activation, rows, dim, h.parameters) for h in heads]
        sizes, weights = zip(*parts, strict=True)
        for head_weights in weights:
            require(head_weights.dtype == self.dtype, "heads of the network's dtype")
        width, dtype = policy.num_logits, self.dtype
        require(policy.value.parameters[-1].shape == (1,), "a single value")
        if value_scale is not None:
            value_scale = value_scale.contiguous()
            require_memory(value_scale, "value scale", (rows,), dtype)
        for limit in policy.limits or ():
            require_memory(limit, "limits", (width,), dtype)
        require_memory(logits, "logits", (rows, width), dtype)
        require_memory(values, "values", (rows,), dtype)
        lowest, highest = policy.limits or (None, None)
        numbers = (lowest, highest, value_scale, logits, values)
        # Keep the copies and arrays until the kernel has read them.
        self._numbers, self._weights = numbers, weights
        addresses = [
            ctypes.addressof(head_weights.addresses) for head_weights in weights
        ]
        self._heads = _Heads(*sizes, *addresses, *map(pointer, numbers))
        self.arguments = (*self.arguments, ctypes.byref(self._heads))


def run_actor_critic(policy: ActorCritic) -> tuple[Tensor, Tensor]:
    """Return logits ``(B, L)`` and values ``(B,)``, without gradients.

    Args:
        policy: policy and observations.

    Raises:
        InputError: a type is out of range.
        MemoryError: there is no memory for the call.
    """
    rows = policy.network.values.shape[0]
    logits = policy.network.values.new_empty((rows, policy.num_logits))
    values = policy.network.values.new_empty((rows,))
    ActorCriticCall(policy, logits, values)("actor_critic")
    return logits, values
