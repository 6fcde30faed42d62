"""Sensory: a permutation-invariant sensory layer, and its baseline, FeedForward."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import (
    Layer,
    layers_of,
    mlp,
    strip_prefix,
    tanh_layers,
)
from marl_pool.networks.set_network import build_part, seeded
from marl_pool.options.types import Size
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.base import State
from marl_pool.pooling import POOLING
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.base import Memory, MemoryPooling
from marl_pool.tokens import Mask, Tokens, TokenSpec


def make_sensor(
    pooling: Mapping[str, Any], spec: TokenSpec, actions: ActionSpec, seed: int | None
) -> MemoryPooling:
    """Build a sensory layer: a recurrent pooling head on the tokens themselves.

    Raises:
        InputError: an unknown name or option, or a pooling head that is not recurrent.
    """
    context = {
        "dim": spec.num_features,
        "num_tokens": spec.num_tokens,
        "has_self": spec.has_self,
        "action_dim": actions.dim,
    }
    with seeded(seed, "pooling"):
        return build_part("pooling", pooling, POOLING, MemoryPooling, context)


NEURONS: Mapping[str, Any] = {"name": "attention_neuron"}
"""Default sensory layer, as in the paper."""


class SensorAgent(Agent):
    """Base class of agents that act only on the codes of a sensory layer."""

    recurrent = True
    sensor: MemoryPooling
    """The sensory layer, a recurrent pooling head on the tokens."""

    def codes(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Return the codes ``(B, T, M·D)`` and the memory; arguments as in `unroll`."""
        x = self.scale_features(features, padding)
        return self.sensor.unroll(x, padding, prev_action, memory)

    @override
    def latent(self, tokens: Tokens, state: State = ()) -> Tensor:
        codes, _ = self.codes(*self.unroll_arguments(tokens, state))
        return codes[:, 0].unflatten(0, tokens.batch_shape)

    @override
    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Return the sensory layer's weights ``(*B, M, N)``, a head for each code."""
        features, padding, prev_action, memory = self.unroll_arguments(tokens, state)
        x = self.scale_features(features, padding)
        weights = self.sensor.attention_weights(x, padding, prev_action, memory)
        return weights.unflatten(0, tokens.batch_shape)


class Sensory(SensorAgent):
    """A sensory layer with one neuron per token, and tanh layers on its codes.

    Each *sensory neuron* reads one token and the previous action, with weights shared
    by all neurons and a separate memory; attention combines their messages to M codes
    that do not depend on the order of the tokens (`AttentionNeuronPooling`). The action
    is computed only from the codes.

    Source: "The Sensory Neuron as a Transformer" (Tang and Ha, 2021,
    https://arxiv.org/abs/2109.02869), section 4.1 (CartPole: 16 codes and a linear
    layer) and section 4.2 (Ant: 32 codes and one hidden layer of 32; two hidden layers
    in a student of behavior cloning).

    Args:
        pooling: ``{"name": …, **options}`` of a recurrent pooling head.
        hidden: widths of the hidden layers on the codes.
        seed: of the initial weights.
    """

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] = NEURONS,
        hidden: Sequence[Size] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__(spec, action_space, pooling=dict(pooling), hidden=list(hidden))
        self.sensor = make_sensor(pooling, spec, self.actions, seed)
        with seeded(seed, "agent"):
            self.body = mlp([self.sensor.dim_out, *hidden, self.actions.dim], nn.Tanh)

    @override
    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        return self.sensor.initial_memory(batch, num_tokens)

    @override
    def unroll(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        codes, memory = self.codes(features, padding, prev_action, memory)
        layers = layers_of(dict(self.body.named_parameters()))
        return self.bound(tanh_layers(codes, layers)), memory

    @override
    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        # Only attention neurons have weights that can be folded in advance.
        sensor = self.sensor
        if not isinstance(sensor, AttentionNeuronPooling):
            return super().members(parameters)
        folded = sensor.fold(strip_prefix("sensor", parameters))
        layers = layers_of(strip_prefix("body", parameters))

        def unroll(
            features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
        ) -> tuple[Tensor, Memory]:
            x = self.scale_features(features, padding)
            codes, memory = sensor.unroll_folded(
                folded, x, padding, prev_action, memory
            )
            return self.bound(tanh_layers(codes, layers)), memory

        return unroll


class FeedForward(Agent):
    """A multilayer perceptron with tanh on the tokens' features in their order.

    The baseline without permutation invariance: each token has separate weights, so the
    result depends on the order of the tokens, which a shuffle destroys. It accepts at
    most the number of tokens it was built for; missing ones are zeros.

    Source: the FNN of "The Sensory Neuron as a Transformer" (Tang and Ha, 2021,
    https://arxiv.org/abs/2109.02869), Tables 2 and 4; tanh in every layer, also after
    the last one where the action is a Box.

    Args:
        hidden: widths of the hidden layers.
        seed: of the initial weights.
    """

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        hidden: Sequence[Size] = (16,),
        seed: int | None = None,
    ) -> None:
        super().__init__(spec, action_space, hidden=list(hidden))
        with seeded(seed, "agent"):
            inputs = spec.num_tokens * spec.num_features
            self.body = mlp([inputs, *hidden, self.actions.dim], nn.Tanh)

    @override
    def unroll(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        layers = layers_of(dict(self.body.named_parameters()))
        return self._unroll(layers, features, padding, prev_action, memory)

    @override
    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        return partial(self._unroll, layers_of(strip_prefix("body", parameters)))

    def _unroll(
        self,
        layers: Sequence[Layer],
        features: Tensor,
        padding: Mask,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Compute `unroll` with the given layers, possibly a population's."""
        missing = self.missing_tokens(features.shape[-2])
        flat = self.scale_features(features, padding).flatten(-2)
        # Missing tokens are zeros, like padded ones.
        flat = nn.functional.pad(flat, (0, missing * self.spec.num_features))
        return self.bound(tanh_layers(flat, layers)), memory
