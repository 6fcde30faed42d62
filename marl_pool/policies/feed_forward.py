"""FeedForward: a multilayer perceptron on the concatenated tokens."""

from collections.abc import Sequence
from itertools import pairwise

from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.kernels.batched import Layer, layers_of, strip_prefix, tanh, tanh_layers
from marl_pool.networks import seeded
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import Agent, Unroll
from marl_pool.pooling.memory import Memory
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.types import PositiveInt


def make_layers(dim_in: int, hidden: Sequence[int], dim_out: int) -> nn.Sequential:
    """Build linear layers with tanh between them."""
    widths, layers = [dim_in, *hidden], list[nn.Module]()
    for dim_from, dim_to in pairwise(widths):
        layers += [nn.Linear(dim_from, dim_to), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], dim_out))


def check_hidden(hidden: Sequence[int], option: str = "hidden") -> list[int]:
    """Return the widths of hidden layers in ``policy.{option}`` as a list.

    Raises:
        InputError: one is below 1.
    """
    if any(width < 1 for width in hidden):
        raise InputError(
            f"policy.{option}: expected widths of at least 1, got {list(hidden)}"
        )
    return list(hidden)


class FeedForward(Agent):
    """A multilayer perceptron with tanh on the tokens' features in their order.

    The baseline without permutation invariance: each token has separate weights, so
    that the result depends on the order of the tokens, which a shuffle destroys. It
    accepts at most the number of tokens it was built for; missing ones are zeros.

    Source: the FNN of "The Sensory Neuron as a Transformer" (Tang and Ha, 2021,
    https://arxiv.org/abs/2109.02869), Tables 2 and 4; tanh in every layer, also after
    the last one where the action is a Box.

    Args:
        spec: sizes and types of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        hidden: widths of the hidden layers.
        seed: of the initial weights.

    Raises:
        InputError: an action space of another kind, or a width below 1.
    """

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        *,
        hidden: Sequence[PositiveInt] = (16,),
        seed: int | None = None,
    ) -> None:
        super().__init__(spec, action_space, hidden=check_hidden(hidden))
        with seeded(seed, "agent"):
            inputs = spec.num_tokens * spec.num_features
            self.body = make_layers(inputs, hidden, self.actions.dim)

    @override
    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        layers = layers_of(dict(self.body.named_parameters()))
        return self.apply_layers(features, padding, layers), memory

    @override
    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        layers = layers_of(strip_prefix("body", parameters))

        def unroll(
            features: Tensor,
            padding: Tensor | None,
            prev_action: Tensor,
            memory: Memory,
        ) -> tuple[Tensor, Memory]:
            return self.apply_layers(features, padding, layers), memory

        return unroll

    def apply_layers(
        self, features: Tensor, padding: Tensor | None, layers: Sequence[Layer]
    ) -> Tensor:
        """Apply layers, possibly those of a population, to features ``(*B, N, F)``."""
        num_tokens = features.shape[-2]
        if num_tokens > self.spec.num_tokens:
            raise UnfitTokensError(
                f"FeedForward: expected at most {self.spec.num_tokens} tokens, "
                f"got {num_tokens}"
            )
        flat = self.scale_features(features, padding).flatten(-2)
        # Missing tokens are zeros, like padded ones.
        missing = (self.spec.num_tokens - num_tokens) * self.spec.num_features
        flat = nn.functional.pad(flat, (0, missing))
        outputs = tanh_layers(flat, layers)
        return outputs if self.actions.discrete else tanh(outputs)
