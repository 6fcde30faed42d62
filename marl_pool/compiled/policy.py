"""Policies computed by the compiled kernel, from the tokens to logits and values."""

from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.compiled.actor_critic import ActorCritic, run_actor_critic
from marl_pool.compiled.mlp import CompiledMLP, compile_mlp
from marl_pool.compiled.module import SharedModule, is_plain
from marl_pool.compiled.native.call import Weights
from marl_pool.compiled.network import CompiledSetNetwork, compile_network
from marl_pool.policies.base import SpecifiedPolicy, State
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Tokens


class CompiledTokenPolicy(SharedModule, TokenPolicy):
    """A policy that acts by one call of the kernel, as far as it qualifies.

    Networks and heads have their compiled counterparts, which are called one by one if
    a gradient is recorded, or if a part of the policy is left to torch.
    """

    def __init__(self, original: TokenPolicy) -> None:
        super().__init__(original)
        self._modules = {
            **original._modules,
            "network": compile_network(original.network),
            "action_head": compile_mlp(original.action_head),
            "value_head": compile_mlp(original.value_head),
        }
        if original.value_network is not None:
            self._modules["value_network"] = compile_network(original.value_network)
        self._is_fixed = False
        self._weights: tuple[Weights, Weights, Weights] | None = None

    def fixed(self) -> "CompiledTokenPolicy":
        """Return a copy for a series of calls in which no weight changes.

        It reads the weights' addresses only in its first call, and does not notice if
        they change.
        """
        policy = copy(self)
        policy._is_fixed = True
        return policy

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy has its weights at other addresses.
        return vars(self) | {"_weights": None}

    @override
    def to_save(self) -> SpecifiedPolicy:
        return cast(SpecifiedPolicy, self.original)

    @override
    def head_outputs(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor, tuple[Memory, ...]]:
        native = None
        # The one call has no gradient; the parts, called one by one, have.
        if not torch.is_grad_enabled():
            native = self.actor_critic(tokens.flatten_batch())
        if native is None:
            return super().head_outputs(tokens, state)
        return *run_actor_critic(native), ()

    def actor_critic(self, tokens: Tokens) -> ActorCritic | None:
        """Return the policy on tokens of batch ``(B,)``, as the kernel reads it.

        None if something is left to torch: a part of the network or of a head, a second
        network, or the selection of tokens.
        """
        network, action, value = self.network, self.action_head, self.value_head
        if (
            self.value_network is not None
            or self.key is not None
            or not isinstance(network, CompiledSetNetwork)
            or not isinstance(action, CompiledMLP)
            or not isinstance(value, CompiledMLP)
            or not network.dim_out == action.widths[0] == value.widths[0]
            or value.widths[-1] != 1
        ):
            return None
        weights = self._weights or (None, None, None)
        inputs = network.inputs(tokens, weights[0])
        if inputs is None:
            return None
        limits = (self.lowest_logits, self.highest_logits)
        native = ActorCritic(
            inputs,
            action.head(weights[1]),
            value.head(weights[2]),
            None if self.actions.integral else limits,
        )
        if self._is_fixed and self._weights is None:
            self._weights = native.gather_weights()
        return native

    def pools(self, tokens: Tokens, *, encoder: bool = False) -> bool:
        """Return True if the kernel pools tokens of batch ``(B,)``.

        With ``encoder``, it may compute only the encoders, as it does if tokens are
        selected.
        """
        return (self.key is None or encoder) and all(
            isinstance(network, CompiledSetNetwork)
            and network.computes(tokens, encoder=encoder)
            for network in self.networks
        )


def compile_policy(policy: TokenPolicy) -> TokenPolicy:
    """Return the compiled counterpart, or the policy if torch computes it all."""
    if type(policy) is not TokenPolicy or not is_plain(policy):
        return policy
    compiled = CompiledTokenPolicy(policy)
    is_same = all(
        compiled._modules[name] is module for name, module in policy._modules.items()
    )
    return policy if is_same else compiled
