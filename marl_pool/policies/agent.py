"""What is evolved or cloned: policies that need no value and no gradient of reward."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from marl_pool.policies.actions import ActionSpec, sample
from marl_pool.policies.base import Decision, SpecifiedPolicy, State
from marl_pool.pooling.memory import Memory
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.randomness import Stream

Unroll = Callable[[Tensor, Tensor | None, Tensor, Memory], tuple[Tensor, Memory]]
"""The form of `Agent.unroll`."""


class Agent(SpecifiedPolicy):
    """A policy whose answer is the action itself, or one logit for each choice.

    An agent of your own writes `unroll`; that is enough to act, to be evolved, a
    population at a time, and to be cloned, many steps at a time. So `unroll` holds
    mathematics on tensors only, without a Python branch on their values.

    It acts deterministically. Where it explores, a choice is drawn from its logits.

    Args:
        spec: of the tokens.
        action_space: Discrete, or a bounded Box of one dimension.
        **options: the constructor's other keyword arguments, JSON-ready.

    Attributes:
        remembers: whether it takes the previous action or has a memory.
        hidden_dim: H, the width of the last hidden layer that `unroll_hidden` shows; 0
            for an agent that shows none.
    """

    remembers: bool = False
    hidden_dim: int = 0

    def __init__(
        self,
        spec: TokenSpec,
        action_space: spaces.Space | ActionSpec,
        **options: Any,
    ) -> None:
        super().__init__(spec, action_space, **options)
        self.noise_size = 1 if self.actions.discrete else 0

    @abstractmethod
    def unroll(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Answer T sets of tokens one after the other.

        Args:
            features: ``(B, T, N, F)``, in the tokens' own dtype.
            padding: ``(B, T, N)`` bool, True = ignore; None where nothing is padded.
            prev_action: ``(B, T, A)``, the action before each set, as
                `ActionSpec.to_vectors` gives it; zeros at an episode's start.
            memory: from `initial_memory` or an earlier call.

        Returns:
            ``(B, T, L)`` and the memory after the last set. For a box L = A, the
            action in [-1, 1]; for a choice of n, L = n logits.
        """

    def unroll_hidden(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Tensor, Memory]:
        """Answer as `unroll` does, and show the last hidden layer.

        An agent that writes it sets ``hidden_dim``. Cloning can then have the layer
        say what the teacher knows.

        Returns:
            As `unroll`, with ``(B, T, H)`` between the two.
        """
        raise NotImplementedError(f"{type(self).__name__} shows no hidden layer")

    def forward(
        self,
        features: Tensor,
        padding: Tensor | None,
        prev_action: Tensor,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """Call `unroll`."""
        return self.unroll(features, padding, prev_action, memory)

    def members(self, parameters: dict[str, Tensor]) -> Unroll:
        """`unroll` for P members, each with parameters of its own.

        Args:
            parameters: by name, each ``(P, …)``.

        Returns:
            A function like `unroll`, whose arguments and results have a leading
            dimension P. A class may know a faster one than this.
        """

        def member(own: dict[str, Tensor], *arguments: Any) -> tuple[Tensor, Memory]:
            result: tuple[Tensor, Memory] = functional_call(self, own, arguments)
            return result

        def unroll(*arguments: Any) -> tuple[Tensor, Memory]:
            batched = tuple(None if part is None else 0 for part in arguments)
            result: tuple[Tensor, Memory] = vmap(member, in_dims=(0, *batched))(
                parameters, *arguments
            )
            return result

        return unroll

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """The memory at an episode's start, ``(batch, …)``; () if there is none."""
        return ()

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """``{"action", "memory"}`` of an episode's start, or ()."""
        if not self.remembers:
            return ()
        shape = (num_envs, num_agents)
        memory = self.initial_memory(num_envs * num_agents, num_tokens)
        memory = tree_map(lambda part: part.unflatten(0, shape), memory)
        action = self.low.new_zeros(*shape, self.actions.dim)
        return {"action": action, "memory": memory}

    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Decide for every row; see `Policy.act`."""
        outputs, memory = self(*self.arguments(tokens, state))
        return self.decide(outputs, memory, tokens, generator, explore)

    def decide(
        self,
        outputs: Tensor,
        memory: Memory,
        tokens: Tokens,
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Turn one step's answer of `unroll` into a decision; see `Policy.act`."""
        shape = tokens.batch_shape
        logits = outputs[:, 0].unflatten(0, shape)
        if not self.actions.discrete:
            action = logits
        elif explore:
            action = sample(self.actions, logits, self.noise(tokens, generator))
        else:
            action = logits.argmax(-1)
        state: State = ()
        if self.remembers:
            vectors = self.actions.to_vectors(action).to(logits.dtype)
            memory = tree_map(lambda part: part.unflatten(0, shape), memory)
            state = {"action": vectors, "memory": memory}
        none = torch.zeros_like(logits[..., 0])
        return Decision(action, none, none, logits, state)

    def arguments(
        self, tokens: Tokens, state: State
    ) -> tuple[Tensor, Tensor | None, Tensor, Memory]:
        """What `unroll` takes for one step of a batch of tokens."""
        flat, dims = tokens.flatten_batch(), len(tokens.batch_shape)
        padding = flat.padding[:, None] if flat.padding.any() else None
        rows = len(flat.types)
        if state:
            merged = tree_map(lambda part: part.flatten(0, dims - 1), state)
            prev_action, memory = merged["action"], merged["memory"]
        else:
            prev_action = self.low.new_zeros(rows, self.actions.dim)
            memory = self.initial_memory(rows, flat.num_tokens)
        return flat.features[:, None], padding, prev_action[:, None], memory

    def readings(
        self,
        features: Tensor,
        padding: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Features as numbers: bytes in [0, 1], 0 under padding.

        Args:
            features: ``(*B, N, F)``, any batch dimensions.
            padding: ``(*B, N)`` bool, True = ignore; None where nothing is padded.
            dtype: of the result; None: the agent's.
        """
        numbers = features.to(dtype or self.low.dtype)
        if features.dtype == torch.uint8:
            numbers = numbers / 255
        if padding is None:
            return numbers
        return numbers.masked_fill(padding[..., None], 0.0)
