"""Base class of policies that may carry a memory from step to step."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.policies.base import SpecifiedPolicy, State
from marl_pool.pooling.memory import Memory
from marl_pool.tokens import Tokens


class RecurrentPolicy(SpecifiedPolicy):
    """A policy that may depend on the previous action and on a memory.

    Where `recurrent` is True its state is ``{"action", "memory"}``, both with leading
    dimensions ``(num_envs, agents)``:

    - ``"action"``: the previous action as a vector ``(…, A)``, see
      `ActionSpec.to_vectors`; zeros at an episode's start,
    - ``"memory"``: the pytree of `initial_memory`.

    Otherwise the state is (). A subclass computes whole sequences, since learners
    backpropagate through many steps at once; acting is a sequence of one step, for
    which `single_step` and `next_state` translate from states and back.
    """

    @property
    @abstractmethod
    def recurrent(self) -> bool:
        """True if decisions depend on the state."""

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """Return the memory ``(batch, …)`` at an episode's start; () for none."""
        return ()

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        if not self.recurrent:
            return ()
        shape = (num_envs, num_agents)
        memory = self.initial_memory(num_envs * num_agents, num_tokens)
        action = self.low.new_zeros(*shape, self.actions.dim)
        return {"action": action, "memory": _unflatten(memory, shape)}

    def single_step(
        self, tokens: Tokens, state: State
    ) -> tuple[Tokens, Tensor, Memory]:
        """Return one step as sequences of length 1.

        Args:
            tokens: of any batch dimensions, ``rows`` in all.
            state: of the same batch dimensions; () for that of an episode's start.

        Returns:
            Tokens of batch ``(rows, 1)``, the previous action ``(rows, 1, A)`` and the
            memory ``(rows, …)``.
        """
        rows = tokens.batch_shape.numel()
        if state:
            last = len(tokens.batch_shape) - 1
            flat = tree_map(lambda part: part.flatten(0, last), state)
            prev_action, memory = flat["action"], flat["memory"]
        else:
            prev_action = self.low.new_zeros(rows, self.actions.dim)
            memory = self.initial_memory(rows, tokens.num_tokens)
        sequences = tokens.flatten_batch().map(lambda part: part[:, None])
        return sequences, prev_action[:, None], memory

    def next_state(self, action: Tensor, memory: Memory, dtype: torch.dtype) -> State:
        """Return the state after ``action``.

        Args:
            action: ``(*B, A)`` or ``(*B,)``, the executed one.
            memory: ``(rows, …)``, after the step.
            dtype: of the previous action in the state.
        """
        if not self.recurrent:
            return ()
        vectors = self.actions.to_vectors(action).to(dtype)
        return {"action": vectors, "memory": _unflatten(memory, vectors.shape[:-1])}


def _unflatten(memory: Memory, shape: tuple[int, ...]) -> Any:
    return tree_map(lambda part: part.unflatten(0, shape), memory)
