"""AttentionNeuron agents on vectors: a sensory layer, a small network on its codes."""

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces
from torch import Tensor

from marl_pool.kernels.batched import Layer, layers_of, strip_prefix, tanh, tanh_layers
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.base import State
from marl_pool.policies.feed_forward import check_hidden, make_layers
from marl_pool.pooling import POOLING
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.memory import Memory, MemoryPooling
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import PositiveInt


def make_sensor(
    pooling: Mapping[str, Any], spec: TokenSpec, actions: ActionSpec, seed: int | None
) -> MemoryPooling:
    """Build a sensory layer: a head on the tokens that takes the previous action.

    Args:
        pooling: ``{"name": …, **options}``.
        spec: of the tokens.
        actions: of the agent.
        seed: of the initial weights.

    Raises:
        InputError: an unknown name or option, or a head without a memory.
    """
    options = dict(pooling)
    context = {
        "dim": spec.num_features,
        "num_tokens": spec.num_tokens,
        "has_self": spec.has_self,
        "action_dim": actions.dim,
    }
    name = options.pop("name", None)
    if name is None:
        raise InputError(f"pooling: expected a mapping with a name, got {pooling}")
    with seeded(seed, "pooling"):
        head: MemoryPooling = build(
            name, POOLING, "pooling", MemoryPooling, options, context
        )
    return head


NEURONS: Mapping[str, Any] = {"name": "attention_neuron"}
"""The sensory layer of the paper."""


class Sensory(Agent):
    """Sensory neurons, one a token, and tanh layers on the codes that they make.

    Source: Tang and Ha (2021), section 4.1 (CartPole: 16 codes and a linear layer)
    and section 4.2 (Ant: 32 codes and one hidden layer of 32; as a student of
    behaviour cloning two of them).

    Args:
        spec: of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        pooling: ``{"name": …, **options}`` of a head that takes the previous action;
            `marl_pool.pooling.attention_neuron` is the paper's.
        hidden: widths of the hidden layers on the codes.
        seed: of the initial weights.

    Raises:
        InputError: an unknown name or option, a head without a memory, an action
            space of another kind, a width below 1.
    """

    remembers = True

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        pooling: Mapping[str, Any] = NEURONS,
        hidden: Sequence[PositiveInt] = (),
        seed: int | None = None,
    ) -> None:
        super().__init__(
            spec, action_space, pooling=dict(pooling), hidden=check_hidden(hidden)
        )
        self.sensor = make_sensor(pooling, spec, self.actions, seed)
        with seeded(seed, "agent"):
            self.body = make_layers(self.sensor.dim_out, hidden, self.actions.dim)

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """That of the sensory layer."""
        return self.sensor.initial_memory(batch, num_tokens)

    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Answer sequences; see `Agent.unroll`."""
        codes, memory = self.codes(features, padding, prev_action, memory)
        return self.answer(codes, layers_of(dict(self.body.named_parameters()))), memory

    def answer(self, codes: Tensor, layers: Sequence[Layer]) -> Tensor:
        """The outputs that some layers make of the codes."""
        outputs = tanh_layers(codes, layers)
        return outputs if self.actions.discrete else tanh(outputs)

    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        """`unroll` for P members; see `Agent.members`."""
        sensor = self.sensor
        if not isinstance(sensor, AttentionNeuronPooling):
            return super().members(parameters)
        folded = sensor.fold(strip_prefix("sensor", parameters))
        layers = layers_of(strip_prefix("body", parameters))

        def unroll(
            features: Tensor,
            padding: Tensor | None,
            prev_action: Tensor,
            memory: Memory,
        ) -> tuple[Tensor, Memory]:
            x = self.readings(features, padding)
            codes, memory = sensor.unroll_folded(
                folded, x, padding, prev_action, memory
            )
            return self.answer(codes, layers), memory

        return unroll

    def codes(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """What the sensory layer makes of sequences, ``(B, T, M·D)``."""
        x = self.readings(features, padding)
        return self.sensor.unroll(x, padding, prev_action, memory)

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor:
        """The codes, ``(*B, M·D)``; see `Policy.latent`."""
        codes, _ = self.codes(*self.arguments(tokens, state))
        return codes[:, 0].unflatten(0, tokens.batch_shape)

    def weights(self, tokens: Tokens, state: Any = ()) -> Tensor | None:
        """The sensory layer's shares, ``(*B, M, N)``; see `Policy.weights`."""
        features, padding, prev_action, memory = self.arguments(tokens, state)
        x = self.readings(features, padding)
        shares = self.sensor.attention_weights(x, padding, prev_action, memory)
        return shares.unflatten(0, tokens.batch_shape)
