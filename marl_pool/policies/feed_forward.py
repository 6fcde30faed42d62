"""FeedForward: a multilayer perceptron on the concatenated tokens."""

from collections.abc import Sequence
from functools import partial

from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.functional import Layer, layers_of, strip_prefix, tanh_layers
from marl_pool.kernels.native.mlp import mlp
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.pooling.memory import Memory
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
        """Compute `unroll` by given layers, possibly those of a population."""
        missing = self.spec.num_tokens - features.shape[-2]
        if missing < 0:
            raise UnfitTokensError(
                f"FeedForward: expected at most {self.spec.num_tokens} tokens, "
                f"got {features.shape[-2]}"
            )
        flat = self.scale_features(features, padding).flatten(-2)
        # Missing tokens are zeros, like padded ones.
        flat = nn.functional.pad(flat, (0, missing * self.spec.num_features))
        return self.bound(tanh_layers(flat, layers)), memory
