"""Agent: the base class of policies that are evolved or cloned."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import functional_call, vmap
from typing_extensions import override

from marl_pool.kernels.batched import tanh
from marl_pool.policies.actions import ActionSpec, sample
from marl_pool.policies.base import Decision, SpecifiedPolicy, State
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Mask, Tokens, TokenSpec
from marl_pool.utils.devices import may_read
from marl_pool.utils.randomness import Stream

Unroll = Callable[[Tensor, Mask, Tensor, Memory], tuple[Tensor, Memory]]
"""Signature of `Agent.unroll`."""


class Agent(SpecifiedPolicy):
    """A policy whose output is the action itself, or one logit for each choice.

    It has no value head: it is found by an evolution strategy or cloned from a teacher.
    It acts deterministically; while exploring, a discrete action is sampled from its
    logits.

    A subclass implements `unroll`. That suffices to act, to evaluate a population in
    one batch (`Population`), and to be cloned from whole sequences. So `unroll` must be
    a function of tensors that `torch.func.vmap` can vectorise, without Python branches
    on their values.

    Attributes:
        hidden_dim: H, width of the last hidden layer that `unroll_hidden` returns; 0
            for an agent without that method.
    """

    recurrent = False
    hidden_dim: int = 0

    def __init__(
        self, spec: TokenSpec, action_space: spaces.Space | ActionSpec, **options: Any
    ) -> None:
        super().__init__(spec, action_space, **options)
        self.noise_size = 1 if self.actions.discrete else 0

    @abstractmethod
    def unroll(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Compute the outputs of B sequences of T sets of tokens.

        Args:
            features: ``(B, T, N, F)``, in the tokens' own dtype.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            prev_action: ``(B, T, A)``, the action before each set, as
                `ActionSpec.to_vectors` returns it; zeros at an episode's start.
            memory: ``(B, …)`` before the first set.

        Returns:
            Outputs ``(B, T, L)``, the action in [-1, 1] for a Box, logits for
            Discrete(L); and the memory after the last set.
        """

    def unroll_hidden(
        self, features: Tensor, padding: Mask, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor, Memory]:
        """Like `unroll`, with the last hidden layer ``(B, T, H)`` as second result.

        An agent that implements it sets ``hidden_dim``. Cloning can then train an
        auxiliary head on that layer, which predicts the teacher's privileged targets.
        """
        raise NotImplementedError(f"{type(self).__name__} shows no hidden layer")

    def forward(self, *arguments: Any) -> tuple[Tensor, Memory]:
        """Call `unroll`."""
        return self.unroll(*arguments)

    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        """Return `unroll` for P members of a population with different parameters.

        Its arguments and results have an additional leading dimension P. Subclasses
        may override it by a faster one.

        Args:
            parameters: by name, ``(P, …)``.
        """

        def member(own: dict[str, Tensor], *arguments: Any) -> Any:
            return functional_call(self, own, arguments)

        def unroll(*arguments: Any) -> Any:
            # None, where nothing is padded, has no dimension to vectorise over.
            batched = tuple(None if part is None else 0 for part in arguments)
            return vmap(member, in_dims=(0, *batched))(parameters, *arguments)

        return unroll

    @override
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        outputs, memory = self(*self.unroll_arguments(tokens, state))
        return self.decide(outputs, memory, tokens, generator, explore)

    def decide(
        self,
        outputs: Tensor,
        memory: Memory,
        tokens: Tokens,
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Turn one step's result of `unroll` into a decision; see `Policy.act`."""
        logits = outputs[:, 0].unflatten(0, tokens.batch_shape)
        # A Box has no noise: its outputs are the action.
        if not self.actions.discrete:
            action = logits
        elif explore:
            action = sample(self.actions, logits, self.noise(tokens, generator))
        else:
            action = logits.argmax(-1)
        state = self.next_state(action, memory, logits.dtype)
        zeros = torch.zeros_like(logits[..., 0])
        return Decision(action, zeros, zeros, logits, state)

    def bound(self, outputs: Tensor) -> Tensor:
        """Apply tanh to outputs that are actions of a Box; logits stay."""
        return outputs if self.actions.discrete else tanh(outputs)

    def unroll_arguments(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Mask, Tensor, Memory]:
        """Return the arguments of `unroll` for one step of a batch of tokens."""
        sequences, prev_action, memory = self.single_step(tokens, state)
        padding: Mask = sequences.padding
        if may_read(sequences.padding) and not sequences.padding.any():
            padding = None
        return sequences.features, padding, prev_action, memory

    def scale_features(
        self, features: Tensor, padding: Mask, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Convert features ``(*B, N, F)`` to floats: bytes to [0, 1], 0 under padding.

        ``dtype`` is that of the result; None: the agent's.
        """
        numbers = features.to(dtype or self.low.dtype)
        if features.dtype == torch.uint8:
            numbers = numbers / 255
        if padding is not None:
            numbers = numbers.masked_fill(padding[..., None], 0.0)
        return numbers
