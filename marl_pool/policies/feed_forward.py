"""FeedForward: a multilayer perceptron on the concatenated tokens."""

from collections.abc import Sequence

from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.batched import Layer, layers_of, strip_prefix, tanh_layers
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.policies.layers import mlp
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Mask, TokenSpec
from marl_pool.utils.errors import UnfitTokensError
from marl_pool.utils.types import PositiveInt


class FeedForward(Agent):
    """A multilayer perceptron with tanh on the tokens' features in their order.

    The baseline without permutation invariance: each token has separate weights, so
    that the result depends on the order of the tokens, which a shuffle destroys. It
    accepts at most the number of tokens it was built for; missing ones are zeros.

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
        hidden: Sequence[PositiveInt] = (16,),
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
        return self._apply_layers(features, padding, layers), memory

    @override
    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        layers = layers_of(strip_prefix("body", parameters))

        def unroll(
            features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
        ) -> tuple[Tensor, Memory]:
            return self._apply_layers(features, padding, layers), memory

        return unroll

    def _apply_layers(
        self, features: Tensor, padding: Mask, layers: Sequence[Layer]
    ) -> Tensor:
        """Apply layers, possibly those of a population, to features ``(*B, N, F)``."""
        missing = self.spec.num_tokens - features.shape[-2]
        if missing < 0:
            raise UnfitTokensError(
                f"FeedForward: expected at most {self.spec.num_tokens} tokens, "
                f"got {features.shape[-2]}"
            )
        flat = self.scale_features(features, padding).flatten(-2)
        # Missing tokens are zeros, like padded ones.
        flat = nn.functional.pad(flat, (0, missing * self.spec.num_features))
        return self.bound(tanh_layers(flat, layers))
